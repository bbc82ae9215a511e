// Operators and copies. An operator is given to the current stream and runs there as the CPU's own
// over the device's memory. Only those whose results decide what the host does next are waited for.
#include "trial.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>

namespace trial {
namespace {

using torch::jit::Stack;
using Turn = std::function<at::Tensor(const at::Tensor&)>;

std::atomic<int64_t> operators_later{0}, operators_now{0}, copies_in{0}, copies_out{0};

// -- the device's memory as tensors of the CPU ----------------------------------------------------

at::Tensor over_memory(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto block = block_of(tensor.storage().data_ptr());
  auto made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                            [block](void*) {}, options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

bool is_there(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A number may come from the host, with the value that it has now. Anything else may not.
at::Tensor argument(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return tensor;
  if (is_there(tensor)) return over_memory(tensor);
  TORCH_CHECK(tensor.dim() == 0 || name == "indices",
              "Expected all tensors to be on the same device, but argument ", name, " is on ",
              tensor.device(), " and others on ", device());
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

at::Tensor zeros_of_host(const at::Tensor& tensor) {
  if (!is_there(tensor)) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  if (made.numel() > 0) std::memset(made.data_ptr(), 0, made.storage().nbytes());
  return made;
}

at::Tensor empty_of_host(const at::Tensor& tensor) {
  return at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor like_on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device()));
}

c10::IValue turned(const c10::IValue& value, const Turn& turn) {
  if (value.isTensor()) return turn(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(turn(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      made.push_back(tensor ? std::make_optional(turn(*tensor)) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().type() == kType) {
    return host_generator(value.toGenerator());
  }
  return value;
}

std::vector<at::Tensor> flat(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// -- operators ------------------------------------------------------------------------------------

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)) {
    for (const auto& result : schema_.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || alias->isWrite(), "trial device: ",
                                  schema_.operator_name(), " is a view that it does not know");
      changed_.push_back(alias == nullptr ? -1 : argument_of(*alias));
    }
  }

  Stack run() {
    if (must_wait()) return run_now();
    Stack shapes;
    if (!knows_results() && !rehearse(shapes)) return run_now();
    return run_later(shapes);
  }

 private:
  int argument_of(const c10::AliasInfo& alias) const {
    const auto& all = schema_.arguments();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto* other = all[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias.beforeSets()) return int(i);
    }
    TORCH_CHECK(false, "trial device: ", schema_.operator_name(), " returns nothing it was given");
  }

  // The CPU makes such a result itself, with shape and strides of its own choice.
  bool is_out(size_t argument) const { return schema_.arguments()[argument].is_out(); }

  // What is drawn comes in the host's order, and what is no tensor goes to the host.
  bool must_wait() const {
    for (const auto tag : {at::Tag::nondeterministic_seeded, at::Tag::dynamic_output_shape,
                           at::Tag::data_dependent_output}) {
      if (op_.hasTag(tag)) return true;
    }
    for (const auto& result : schema_.returns()) {
      const auto& type = *result.type();
      if (!type.isSubtypeOf(*c10::TensorType::get()) &&
          !type.isSubtypeOf(*c10::ListType::ofTensors())) {
        return true;
      }
    }
    return false;
  }

  bool knows_results() const {
    for (const int argument : changed_) {
      if (argument < 0) return false;
      for (const auto& tensor : flat(arguments_[argument])) {
        if (tensor.numel() == 0) return false;  // it may have to grow
      }
    }
    return true;
  }

  // On zeros, for the shapes and strides that the CPU gives its results.
  bool rehearse(Stack& shapes) const {
    shapes = translated([](const at::Tensor& tensor, const std::string&) {
      return zeros_of_host(tensor);
    });
    try {
      op_.callBoxed(&shapes);
    } catch (const std::exception&) {
      return false;  // zeros are not for it, or the call is wrong, which the real one will say
    }
    for (size_t i = 0; i < changed_.size(); ++i) {
      if (changed_[i] < 0) continue;
      const auto had = flat(arguments_[changed_[i]]), needs = flat(shapes[i]);
      for (size_t j = 0; j < had.size(); ++j) {
        if (had[j].sizes() != needs[j].sizes()) had[j].resize_(needs[j].sizes());
      }
    }
    return true;
  }

  Stack run_later(const Stack& shapes) const {
    ++operators_later;
    Stack results;
    std::vector<std::vector<at::Tensor>> into;  // by result; none for what is changed where it is
    for (size_t i = 0; i < changed_.size(); ++i) {
      auto& own = into.emplace_back();
      const bool made = changed_[i] < 0;
      results.push_back(made ? turned(shapes[i], like_on_device) : arguments_[changed_[i]]);
      if (!made && !is_out(changed_[i])) continue;
      for (const auto& tensor : flat(results.back())) {
        own.push_back(is_there(tensor) ? over_memory(tensor) : tensor);
      }
    }
    auto& stream = queue(current_stream());
    stream.give([&stream, op = op_, stack = translated(argument), into]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      stream.be_late(delays().operators_us);
      op.callBoxed(&stack);
      for (size_t i = 0; i < into.size(); ++i) {
        if (into[i].empty()) continue;
        const auto made = flat(stack[i]);
        for (size_t j = 0; j < made.size(); ++j) {
          if (made[j].defined()) into[i][j].copy_(made[j]);
        }
      }
    });
    return results;
  }

  static void copy_over(Queue& stream, const at::Tensor& from, const at::Tensor& there) {
    stream.give([from, into = over_memory(there)] {
      at::AutoDispatchBelowADInplaceOrView below;
      into.copy_(from);
    });
  }

  Stack run_now() const {
    ++operators_now;
    auto& stream = queue(current_stream());
    stream.wait(stream.given());
    Stack stack = translated(argument), results;
    op_.callBoxed(&stack);
    const Turn moved = [&](const at::Tensor& tensor) {
      auto made = like_on_device(tensor);
      if (is_there(made)) copy_over(stream, tensor, made);
      return made;
    };
    for (size_t i = 0; i < changed_.size(); ++i) {
      if (changed_[i] >= 0 && is_out(changed_[i])) {
        const auto had = flat(arguments_[changed_[i]]), made = flat(stack[i]);
        for (size_t j = 0; j < had.size(); ++j) {
          copy_over(stream, made[j], had[j].resize_(made[j].sizes()));
        }
      }
      results.push_back(changed_[i] >= 0 ? arguments_[changed_[i]] : turned(stack[i], moved));
    }
    return results;
  }

  using Translation = std::function<at::Tensor(const at::Tensor&, const std::string&)>;

  Stack translated(const Translation& of) const {
    Stack made;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const std::string& name = schema_.arguments()[i].name();
      if (name == "generator" && arguments_[i].isNone()) {
        made.emplace_back(host_generator(default_generator()));
      } else if (is_out(i)) {
        made.push_back(turned(arguments_[i], empty_of_host));
      } else {
        made.push_back(
            turned(arguments_[i], [&](const at::Tensor& tensor) { return of(tensor, name); }));
      }
    }
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const Stack arguments_;
  std::vector<int> changed_;  // by result: the argument that it is, or -1 if it is new
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call(op, torch::jit::pop(*stack, op.schema().arguments().size()));
  for (auto& result : call.run()) stack->push_back(std::move(result));
}

// The CPU's own would draw from the CPU's generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto kind = input.options().dtype(at::kBool);
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, kind)};
  }
  auto mask = at::empty_like(input, kind).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// -- copies ---------------------------------------------------------------------------------------

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool non_blocking) {
  const bool link = from.device() != into.device();
  if (link) ++(is_there(into) ? copies_in : copies_out);
  auto source = is_there(from) ? over_memory(from) : from.detach();
  auto target = is_there(into) ? over_memory(into) : into.detach();
  auto& stream = queue(current_stream());
  const auto number = stream.give([&stream, source, target, link] {
    at::AutoDispatchBelowADInplaceOrView below;
    if (link) {  // what is on its way is not there yet
      if (target.is_non_overlapping_and_dense() && target.numel() > 0) {
        std::memset(target.data_ptr(), kPoison, target.nbytes());
      }
      stream.be_late(delays().copies_us);
    } else {
      stream.be_late(delays().operators_us);
    }
    target.copy_(source);
  });
  if (link && !non_blocking) stream.wait(number);
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  into.resize_(from.sizes());
  return copy_from(from, into, false);
}

// -- memory and views -----------------------------------------------------------------------------

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, memory(), kKeys,
                                           c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  c10::getDeviceAllocator(kType)->recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  // Otherwise they would be put together from others, and rounded otherwise than on the CPU.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_memory", &set_memory);
  m.def("set_fraction", &set_fraction);
  m.def("memory_info", &memory_info);
  m.def("set_pinnable", &set_pinnable);
  m.def("set_delays", [](int copies_us, int operators_us, uint32_t seed) {
    set_delays({copies_us, operators_us, seed});
  });
  m.def("hold", [](int64_t stream, bool held) { queue(stream).hold(held); });
  m.def("default_generator", &default_generator, pybind11::return_value_policy::copy);
  m.def("counts", [] {
    return std::map<std::string, int64_t>{{"operators", operators_later},
                                          {"waited for", operators_now},
                                          {"copies in", copies_in},
                                          {"copies out", copies_out}};
  });
}

}  // namespace trial
