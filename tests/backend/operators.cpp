// Copies, memory and views of the trial backend; its operators are those of fallback.hpp.
#include "fallback.hpp"
#include "trial.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

namespace fallback {

const c10::DeviceType kDevice = trial::kType;

c10::Device here() { return trial::device(); }

at::Tensor over_memory(const at::Tensor& tensor) {
  auto block = trial::block_of(tensor.storage().data_ptr());
  return blob(tensor, tensor.data_ptr(), [block](void*) {});
}

void will_write(const at::Tensor&) {}

void ran_on_host(const char*) {}

void give(const char*, std::function<void()> work) {
  auto& stream = trial::queue(trial::current_stream());
  stream.give([&stream, work = std::move(work)] {
    at::AutoDispatchBelowADInplaceOrView below;
    stream.be_late(trial::delays().operators_us);
    work();
  });
}

void settle(bool) {
  auto& stream = trial::queue(trial::current_stream());
  stream.wait(stream.given());
}

bool draws_in_order() { return true; }

at::Generator default_generator() { return trial::default_generator(); }

at::Generator host_generator(const at::Generator& of_device) {
  return trial::host_generator(of_device);
}

}  // namespace fallback

namespace trial {
namespace {

using fallback::is_there;
using fallback::over_memory;

std::atomic<int64_t> copies_in{0}, copies_out{0};

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
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback::fallback>());
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
  m.impl("native_dropout", TORCH_FN(fallback::native_dropout));
  // Otherwise they would be put together from others, and rounded otherwise than on the CPU.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback::fallback>());
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
    return std::map<std::string, int64_t>{{"operators", fallback::operators_later},
                                          {"waited for", fallback::operators_now},
                                          {"copies in", copies_in},
                                          {"copies out", copies_out}};
  });
}

}  // namespace trial
