// Operators of a device that computes with the CPU's own: each is given to the current stream and
// runs there over the device's memory. Only those whose results decide what the host does next are
// waited for. The trial backend and software CUDA differ in what is declared first.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

namespace fallback {

// -- what a device says of itself -----------------------------------------------------------------

extern const c10::DeviceType kDevice;
c10::Device here();                                 // the current one
// The device's memory as a tensor of the CPU, for the operator that is launched next.
at::Tensor over_memory(const at::Tensor& tensor);
void will_write(const at::Tensor& tensor);  // the operator that is launched next writes to it
void give(const char* name, std::function<void()> work);  // launches an operator on the current stream
void ran_on_host(const char* name);  // an operator was run at once instead
void settle(bool reads);                            // the host waits for it; `reads`: a device would too
bool draws_in_order();                              // one generator draws for all streams
at::Generator default_generator();
at::Generator host_generator(const at::Generator& of_device);  // what draws in its place

// -- the device's memory as tensors of the CPU ----------------------------------------------------

using torch::jit::Stack;
using Turn = std::function<at::Tensor(const at::Tensor&)>;

inline std::atomic<int64_t> operators_later{0}, operators_now{0};

// Of the size and strides of a tensor, over memory that stays where it is.
inline at::Tensor blob(const at::Tensor& tensor, void* memory, std::function<void(void*)> release) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto made = at::from_blob(memory, tensor.sizes(), tensor.strides(), std::move(release), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return made;
}

inline bool is_there(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// A number may come from the host, with the value that it has now. Anything else may not.
inline at::Tensor argument(const at::Tensor& tensor, const std::string& name) {
  if (!tensor.defined()) return tensor;
  if (tensor.device() == here()) return over_memory(tensor);
  TORCH_CHECK(!is_there(tensor) && (tensor.dim() == 0 || name == "indices"),
              "Expected all tensors to be on the same device, but argument ", name, " is on ",
              tensor.device(), " and others on ", here());
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

inline at::Tensor zeros_of_host(const at::Tensor& tensor) {
  if (!is_there(tensor)) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  if (made.numel() > 0) std::memset(made.data_ptr(), 0, made.storage().nbytes());
  return made;
}

inline at::Tensor empty_of_host(const at::Tensor& tensor) {
  return at::empty({0}, at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

inline at::Tensor like_on_device(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(here()));
}

using Draw = at::Generator (*)(const at::Generator& of_device);

// For a rehearsal, which draws nothing.
inline at::Generator any_generator(const at::Generator&) {
  return at::detail::createCPUGenerator(0);
}

inline c10::IValue turned(const c10::IValue& value, const Turn& turn, Draw draw = host_generator) {
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
  if (value.isDevice() && value.toDevice().type() == kDevice) return c10::Device(c10::kCPU);
  if (value.isGenerator() && value.toGenerator().device().type() == kDevice) {
    return draw(value.toGenerator());
  }
  return value;
}

inline std::vector<at::Tensor> flat(const c10::IValue& value) {
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
      TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || alias->isWrite(), "fallback: ",
                                  schema_.operator_name(), " is a view that it does not know");
      changed_.push_back(alias == nullptr ? -1 : argument_of(*alias));
    }
  }

  Stack run() {
    if (must_wait()) return run_now(/*reads=*/true);
    Stack shapes;
    if (!knows_results() && !rehearse(shapes)) return run_now(/*reads=*/false);
    return run_later(shapes);
  }

 private:
  int argument_of(const c10::AliasInfo& alias) const {
    const auto& all = schema_.arguments();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto* other = all[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias.beforeSets()) return int(i);
    }
    TORCH_CHECK(false, "fallback: ", schema_.operator_name(), " returns nothing it was given");
  }

  // The CPU makes such a result itself, with shape and strides of its own choice.
  bool is_out(size_t argument) const { return schema_.arguments()[argument].is_out(); }

  // What is drawn comes in the host's order, and what is no tensor goes to the host.
  bool must_wait() const {
    if (draws_in_order() && op_.hasTag(at::Tag::nondeterministic_seeded)) return true;
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    if (op_.hasTag(at::Tag::dynamic_output_shape) && !indexes_by_number()) return true;
    for (const auto& result : schema_.returns()) {
      const auto& type = *result.type();
      if (!type.isSubtypeOf(*c10::TensorType::get()) &&
          !type.isSubtypeOf(*c10::ListType::ofTensors())) {
        return true;
      }
    }
    return false;
  }

  // Whose result is as large as its indices, which a mask's is not.
  bool indexes_by_number() const {
    if (schema_.name() != "aten::index") return false;
    for (const auto& index : arguments_[1].toOptionalTensorVector()) {
      const bool mask = index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
      if (mask) return false;
    }
    return true;
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
    shapes = translated(
        [](const at::Tensor& tensor, const std::string&) { return zeros_of_host(tensor); },
        any_generator);
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
      for (const auto& tensor : flat(results.back())) {
        if (is_there(tensor)) will_write(tensor);
      }
      if (!made && !is_out(changed_[i])) continue;
      for (const auto& tensor : flat(results.back())) {
        own.push_back(is_there(tensor) ? over_memory(tensor) : tensor);
      }
    }
    auto stack = translated(argument, host_generator);
    give(schema_.name().c_str(), [op = op_, stack = std::move(stack), into]() mutable {
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

  static void copy_over(const at::Tensor& from, const at::Tensor& there) {
    will_write(there);
    give("a result of the host", [from, into = over_memory(there)] { into.copy_(from); });
  }

  Stack run_now(bool reads) const {
    ++operators_now;
    settle(reads);
    Stack stack = translated(argument, host_generator), results;
    op_.callBoxed(&stack);
    ran_on_host(schema_.name().c_str());
    const Turn moved = [&](const at::Tensor& tensor) {
      auto made = like_on_device(tensor);
      if (is_there(made)) copy_over(tensor, made);
      return made;
    };
    for (size_t i = 0; i < changed_.size(); ++i) {
      if (changed_[i] >= 0 && is_out(changed_[i])) {
        const auto had = flat(arguments_[changed_[i]]), made = flat(stack[i]);
        for (size_t j = 0; j < had.size(); ++j) {
          copy_over(made[j], had[j].resize_(made[j].sizes()));
        }
      }
      results.push_back(changed_[i] >= 0 ? arguments_[changed_[i]] : turned(stack[i], moved));
    }
    return results;
  }

  using Translation = std::function<at::Tensor(const at::Tensor&, const std::string&)>;

  Stack translated(const Translation& of, Draw draw) const {
    Stack made;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const std::string& name = schema_.arguments()[i].name();
      if (name == "generator" && arguments_[i].isNone()) {
        made.emplace_back(draw(default_generator()));
      } else if (is_out(i)) {
        made.push_back(turned(arguments_[i], empty_of_host));
      } else {
        made.push_back(turned(
            arguments_[i], [&](const at::Tensor& tensor) { return of(tensor, name); }, draw));
      }
    }
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const Stack arguments_;
  std::vector<int> changed_;  // by result: the argument that it is, or -1 if it is new
};

// Of the first tensor that is on a device, or the one that is asked for.
inline std::optional<c10::Device> place(const Stack& arguments) {
  for (const auto& value : arguments) {
    for (const auto& tensor : flat(value)) {
      if (is_there(tensor)) return tensor.device();
    }
    if (value.isDevice() && value.toDevice().type() == kDevice && value.toDevice().has_index()) {
      return value.toDevice();
    }
  }
  return std::nullopt;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const c10::OptionalDeviceGuard guard(place(arguments));
  Call call(op, std::move(arguments));
  for (auto& result : call.run()) stack->push_back(std::move(result));
}

// The CPU's own would draw from the CPU's generator.
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto kind = input.options().dtype(at::kBool);
  if (input.numel() == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, kind)};
  }
  auto mask = at::empty_like(input, kind).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace fallback
