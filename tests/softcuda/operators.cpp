// Software CUDA's operators: those that torch has for CUDA become those of ../backend/fallback.hpp,
// attention has the outputs and the workspaces of the kernels it stands for, and memory, copies and
// views stay torch's own.
#include "../backend/fallback.hpp"
#include "runtime.hpp"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace fallback {

const c10::DeviceType kDevice = c10::DeviceType::CUDA;

c10::Device here() { return c10::impl::VirtualGuardImpl(kDevice).getDevice(); }

namespace {
void* stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Bytes that the operator which this thread launches next reads and writes.
thread_local std::vector<softcuda::Range> accessed;

void will_access(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  accessed.push_back({tensor.const_data_ptr(), size_t(last + 1) * tensor.element_size(), writes});
}
}  // namespace

void will_write(const at::Tensor& tensor) { will_access(tensor, true); }

void ran_on_host(const char* name) {
  softcuda_access(stream(), accessed.data(), accessed.size(), name);
  accessed.clear();
}

// The caching allocator keeps memory for the order of its stream, so nothing is held here.
at::Tensor over_memory(const at::Tensor& tensor) {
  will_access(tensor, false);
  return blob(tensor, softcuda_host_view(tensor.const_data_ptr()), [](void*) {});
}

void give(const char* name, std::function<void()> work) {
  const auto run = [](void* data) {
    std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(data));
    try {
      at::AutoDispatchBelowADInplaceOrView below;
      (*own)();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "software CUDA: %s\n", error.what());
      softcuda_fail();
    }
  };
  softcuda_access(stream(), accessed.data(), accessed.size(), name);
  accessed.clear();
  softcuda_push(stream(), run, new std::function<void()>(std::move(work)));
  // torch looks for an error after every launch, whoever made it.
  if (const auto error = cudaGetLastError(); error != cudaSuccess) {
    TORCH_CHECK(false, "CUDA error: ", cudaGetErrorString(error));
  }
}

void settle(bool reads) { softcuda_join(stream(), reads); }

bool draws_in_order() { return false; }

at::Generator default_generator() { return at::globalContext().defaultGenerator(here()); }

// Every call has draws of its own, which the generator's seed and offset give.
at::Generator host_generator(const at::Generator& of_device) {
  auto* own = of_device.unsafeGetGeneratorImpl();
  std::lock_guard lock(own->mutex_);
  const uint64_t offset = own->get_offset();
  own->set_offset(offset + 4);
  return at::detail::createCPUGenerator(own->current_seed() * 0x9E3779B97F4A7C15 + offset);
}

}  // namespace fallback

namespace softcuda {
namespace {

constexpr auto kDispatchKey = c10::DispatchKey::CUDA;

using at::Tensor;
using fallback::is_there;
using fallback::over_memory;

// -- attention ------------------------------------------------------------------------------------

constexpr bool kKnowsGroups = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 12;

struct Attention {
  Tensor query, key, value;  // here, as tensors of the CPU
  std::optional<Tensor> bias;
  double dropout;
  bool causal;
  std::optional<double> scale;
  uint64_t seed, offset;

  // Query heads in groups share a head of keys and values, which the CPU's kernel may know.
  int64_t group() const { return query.size(1) / key.size(1); }
  Tensor repeated(const Tensor& one) const {
    return group() == 1 || (kKnowsGroups && plain()) ? one : one.repeat_interleave(group(), 1);
  }
  Tensor summed(const Tensor& many) const {
    if (many.size(1) == key.size(1)) return many;
    return many.unflatten(1, {key.size(1), group()}).sum(2);
  }
  bool plain() const { return dropout == 0 && query.size(3) == value.size(3); }

  std::pair<Tensor, Tensor> forward() const {
    const auto k = repeated(key), v = repeated(value);
    if (plain()) {
      auto [out, sums] =
          at::_scaled_dot_product_flash_attention_for_cpu(query, k, v, 0.0, causal, bias, scale);
      return {out, sums};
    }
    const auto scores = this->scores(k);
    const auto kept = at::softmax(scores, -1) * mask(scores);
    return {at::matmul(kept, v.to(at::kFloat)).to(query.scalar_type()), at::logsumexp(scores, -1)};
  }

  std::array<Tensor, 4> backward(const Tensor& d_out, const Tensor& out, const Tensor& sums,
                                 bool wants_bias) const {
    const auto k = repeated(key), v = repeated(value);
    if (plain() && !wants_bias) {
      const auto own = sums.transpose(1, 2).contiguous().transpose(1, 2);
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          d_out, query, k, v, out, own, 0.0, causal, bias, scale);
      return {dq, summed(dk), summed(dv), Tensor()};
    }
    const auto type = query.scalar_type();
    const auto wide = d_out.to(at::kFloat), scores = this->scores(k);
    const auto weights = at::softmax(scores, -1), mask = this->mask(scores);
    const auto dv = at::matmul((weights * mask).transpose(-1, -2), wide);
    const auto d_kept = at::matmul(wide, v.to(at::kFloat).transpose(-1, -2)) * mask;
    const auto d_scores = weights * (d_kept - (d_kept * weights).sum(-1, true));
    const auto dq = at::matmul(d_scores, k.to(at::kFloat)) * factor();
    const auto dk = at::matmul(d_scores.transpose(-1, -2), query.to(at::kFloat)) * factor();
    return {dq.to(type), summed(dk).to(type), summed(dv).to(type), d_scores.to(type)};
  }

  double factor() const { return scale.value_or(1 / std::sqrt(double(query.size(3)))); }
  Tensor scores(const Tensor& k) const {
    auto made = at::matmul(query.to(at::kFloat), k.to(at::kFloat).transpose(-1, -2)) * factor();
    if (bias) made = made + *bias;
    if (causal) {
      const auto later = at::full({made.size(-2), made.size(-1)}, -INFINITY).triu(1);
      made = made + later;
    }
    return made;
  }
  Tensor mask(const Tensor& scores) const {  // the same in forward and backward
    if (dropout == 0) return at::scalar_tensor(1.0f);
    auto draws = at::detail::createCPUGenerator(seed * 31 + offset);
    return at::bernoulli(at::full(scores.sizes(), 1 - dropout), draws) / (1 - dropout);
  }
};

int64_t rounded(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

std::pair<uint64_t, uint64_t> drawn(double dropout) {
  if (dropout == 0) return {0, 0};
  auto generator = fallback::default_generator();
  std::lock_guard lock(generator.mutex());
  auto* own = generator.unsafeGetGeneratorImpl();
  const uint64_t offset = own->get_offset();
  own->set_offset(offset + 4);
  return {own->current_seed(), offset};
}

void attend(const Attention& what, const Tensor& out, const Tensor& sums) {
  for (const auto& result : {out, sums}) fallback::will_write(result);
  fallback::give("attention", [=, out = over_memory(out), sums = over_memory(sums)] {
    auto [made, totals] = what.forward();
    out.copy_(made);
    if (sums.numel() > 0) {
      sums.fill_(INFINITY);
      sums.narrow(2, 0, totals.size(2)).copy_(totals);
    }
  });
}

std::optional<Tensor> seen(const std::optional<Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  return over_memory(*tensor);
}

// Flash attention. Its random state is on the device (before torch 2.7: two numbers of the host).
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool causal,
      bool, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(query.device());
  const auto [seed, offset] = drawn(dropout);
  auto out = at::empty_like(query);
  auto sums = at::empty({query.size(0), query.size(1), query.size(2)},
                        query.options().dtype(at::kFloat));
  attend({over_memory(query), over_memory(key), over_memory(value), std::nullopt, dropout, causal,
          scale, seed, offset}, out, sums);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
  auto random = at::empty({2}, query.options().dtype(at::kUInt64));
  auto unused = at::empty({}, query.options().dtype(at::kUInt64));
  fallback::will_write(random);
  fallback::give("attention", [random = over_memory(random), seed = seed, offset = offset] {
    random.data_ptr<uint64_t>()[0] = seed;
    random.data_ptr<uint64_t>()[1] = offset;
  });
#else
  auto random = at::scalar_tensor(int64_t(seed), at::kLong);
  auto unused = at::scalar_tensor(int64_t(offset), at::kLong);
#endif
  return {out, sums, Tensor(), Tensor(), query.size(2), key.size(2), random, unused,
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& d_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool causal, const Tensor& random, const Tensor& unused,
    std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(query.device());
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  const auto wide = query.options().dtype(at::kFloat);
  // What the kernel takes besides its results: the sum of dq in fp32, and dk and dv of every head.
  const auto dq_sum = at::empty({batch, rounded(length, 128), heads, rounded(query.size(3), 32)}, wide);
  const auto rows = at::empty({batch, heads, rounded(length, 128)}, wide);
  Tensor every_dk, every_dv;
  if (key.size(1) != heads) {
    const auto shape = {batch, key.size(2), heads, key.size(3)};
    every_dk = at::empty(shape, key.options());
    every_dv = at::empty(shape, key.options());
  }
  auto dq = at::empty_like(query), dk = at::empty_like(key), dv = at::empty_like(value);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
  TORCH_CHECK(dropout == 0 || is_there(random), "flash attention: its random state is not on the device");
  const auto state = is_there(random) ? over_memory(random) : Tensor();
#else
  TORCH_CHECK(!is_there(random) && !is_there(unused), "segmentation fault: seed on the device");
  const auto state = Tensor();
#endif
  Attention what{over_memory(query), over_memory(key), over_memory(value), std::nullopt, dropout,
                 causal, scale, 0, 0};
  if (dropout > 0 && !state.defined()) {
    what.seed = random.item<int64_t>();
    what.offset = unused.item<int64_t>();
  }
  for (const auto& result : {dq, dk, dv}) fallback::will_write(result);
  fallback::give("attention's backward", [=, d_out = over_memory(d_out), out = over_memory(out), sums = over_memory(sums),
                  dq = over_memory(dq), dk = over_memory(dk), dv = over_memory(dv)]() mutable {
    if (dropout > 0 && state.defined()) {
      what.seed = state.data_ptr<uint64_t>()[0];
      what.offset = state.data_ptr<uint64_t>()[1];
    }
    auto made = what.backward(d_out, out, sums, false);
    dq.copy_(made[0]);
    dk.copy_(made[1]);
    dv.copy_(made[2]);
  });
  return {dq, dk, dv};
}

// Memory-efficient attention. Its seed and offset are numbers of the host, which backward reads.
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias,
    bool sums_wanted, double dropout, bool causal, std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(query.device());
  const auto [seed, offset] = drawn(dropout);
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  auto out = at::empty({batch, length, heads, value.size(3)}, query.options()).transpose(1, 2);
  auto sums = at::empty({batch, heads, sums_wanted ? rounded(length, 32) : 0},
                        query.options().dtype(at::kFloat));
  attend({over_memory(query), over_memory(key), over_memory(value), seen(bias), dropout, causal,
          scale, seed, offset}, out, sums);
  return {out, sums, at::scalar_tensor(int64_t(seed), at::kLong),
          at::scalar_tensor(int64_t(offset), at::kLong)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& d_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor& out, const Tensor& sums, const Tensor& seed,
    const Tensor& offset, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  const c10::OptionalDeviceGuard guard(query.device());
  TORCH_CHECK(dropout == 0 || (!is_there(seed) && !is_there(offset)),
              "segmentation fault: attention reads seed and offset on the host, and they are on ",
              seed.device());
  const auto wide = query.options().dtype(at::kFloat);
  const auto workspace = at::empty({key.numel() + value.numel()}, wide);
  auto dq = at::empty_like(query), dk = at::empty_like(key), dv = at::empty_like(value);
  auto d_bias = wanted[3] ? at::empty_like(bias) : Tensor();
  const Attention what{over_memory(query), over_memory(key), over_memory(value), seen(bias), dropout,
                       causal, scale, dropout > 0 ? uint64_t(*seed.const_data_ptr<int64_t>()) : 0,
                       dropout > 0 ? uint64_t(*offset.const_data_ptr<int64_t>()) : 0};
  const int64_t length = query.size(2);
  for (const auto& result : {dq, dk, dv}) fallback::will_write(result);
  fallback::give("attention's backward", [=, d_out = over_memory(d_out), out = over_memory(out), sums = over_memory(sums),
                  dq = over_memory(dq), dk = over_memory(dk), dv = over_memory(dv),
                  d_bias = seen(d_bias)] {
    auto made = what.backward(d_out, out, sums.narrow(2, 0, length), d_bias.has_value());
    dq.copy_(made[0]);
    dk.copy_(made[1]);
    dv.copy_(made[2]);
    if (d_bias) d_bias->copy_(made[3].sum_to_size(d_bias->sizes()));
  });
  return {dq, dk, dv, d_bias};
}

// -- copies ---------------------------------------------------------------------------------------

// torch's own, but for those within the device that need a kernel.
Tensor& copy_(Tensor& into, const Tensor& from, bool non_blocking) {
  const bool bytes = into.scalar_type() == from.scalar_type() && into.sizes() == from.sizes() &&
                     into.is_contiguous() && from.is_contiguous() && !from.is_neg() &&
                     !from.is_conj() && !into.is_neg() && !into.is_conj();
  if (!is_there(into) || !is_there(from) || into.device() != from.device() || bytes) {
    return at::native::copy_(into, from, non_blocking);
  }
  const c10::OptionalDeviceGuard guard(into.device());
  fallback::will_write(into);
  fallback::give("aten::copy_", [into = over_memory(into), from = over_memory(from)] {
    into.copy_(from);
  });
  return into;
}

// -- workspaces of libraries ----------------------------------------------------------------------

std::atomic<int64_t> workspace_bytes{0};  // that a thread's cuBLAS takes for every stream

std::atomic<int64_t> handle_bytes{0};  // that cuBLAS takes for the handle of a thread

// Before a thread's first matrix product. A handle lies outside torch's allocator.
void ensure_handle() {
  thread_local int64_t charged = 0;
  const int64_t wanted = handle_bytes;
  if (charged >= wanted) return;
  TORCH_CHECK(softcuda_charge(fallback::here().index(), size_t(wanted - charged)),
              "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
  charged = wanted;
}

// Before a matrix product. torch keeps such workspaces for as long as the process lives.
void ensure_workspace() {
  if (workspace_bytes == 0) return;
  static std::mutex mutex;
  static auto* known = new std::map<std::pair<std::thread::id, void*>, Tensor>;
  std::lock_guard lock(mutex);
  auto& own = (*known)[{std::this_thread::get_id(), fallback::stream()}];
  if (own.defined()) return;
  own = at::empty({workspace_bytes}, at::TensorOptions().dtype(at::kByte).device(fallback::here()));
}

void product(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ensure_handle();
  ensure_workspace();
  fallback::fallback(op, stack);
}

// -- who is who -----------------------------------------------------------------------------------

const std::set<std::string> kOwn = {
    // memory, views and facts: no kernel runs
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::record_stream",
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::is_set_to", "aten::is_pinned", "aten::_pin_memory",
    "aten::_has_same_storage_numel", "aten::_efficientzerotensor", "aten::_fused_sdp_choice",
    "aten::_local_scalar_dense",
    // registered below
    "aten::copy_", "aten::native_dropout", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward"};
const std::set<std::string> kProducts = {"aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out",
                                         "aten::bmm", "aten::bmm.out", "aten::baddbmm"};

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

int64_t replace() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", kDispatchKey, __FILE__, __LINE__);
  const auto boxed = [] { return torch::CppFunction::makeFromBoxedFunction<&fallback::fallback>(); };
  auto& all = c10::Dispatcher::singleton();
  int64_t count = 0;
  for (const auto& name : all.getRegistrationsForDispatchKey(kDispatchKey)) {
    const auto full = toString(name);
    const auto op = all.findSchema(name);
    if (name.getNamespace() != "aten" || kOwn.count(full) || !op || is_view(op->schema())) continue;
    const auto inner = full.substr(6);
    if (kProducts.count(full)) {
      library->impl(inner.c_str(), torch::CppFunction::makeFromBoxedFunction<&product>());
    } else {
      library->impl(inner.c_str(), boxed());
    }
    ++count;
  }
  for (const char* name : {"convolution", "convolution_backward"}) library->impl(name, boxed());
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("native_dropout", TORCH_FN(fallback::native_dropout));
  library->impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  library->impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  library->impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library->impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
  return count;
}

// -- released memory, and waits -------------------------------------------------------------------

std::atomic<bool> poisons{std::getenv("SOFTCUDA_POISON") != nullptr};

// What is released is its next owner's at once, in the order of the stream that asked for it: both
// ends of a block's life count as writes to it.
void watch_memory() {
  static bool attached = false;
  if (std::exchange(attached, true)) return;
  namespace allocator = c10::cuda::CUDACachingAllocator;
  allocator::attachAllocatorTraceTracker([](const allocator::TraceEntry& entry) {
    const bool ends = entry.action_ == allocator::TraceEntry::FREE_COMPLETED;
    if (!(ends || entry.action_ == allocator::TraceEntry::ALLOC)) return;
    auto* memory = reinterpret_cast<void*>(entry.addr_);
    const softcuda::Range range{memory, entry.size_, true};
    // The default stream has no address, and the current device may be another one.
    void* stream = entry.stream_ ? entry.stream_ : softcuda_default_stream(entry.device_);
    softcuda_access(stream, &range, 1, ends ? "the release of memory" : "an allocation");
    if (poisons) softcuda_overwrite(stream, memory, entry.size_);
  });
}

pybind11::object* listener = nullptr;  // never destroyed

void tell(const char* what) {
  if (listener == nullptr || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (!listener->is_none()) (*listener)(what);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("replace", &replace);
  m.def("watch_memory", &watch_memory);
  m.def("set_poison", [](bool on) { poisons = on; });
  m.def("set_workspace", [](int64_t bytes) { workspace_bytes = bytes; });
  m.def("set_handle", [](int64_t bytes) { handle_bytes = bytes; });
  m.def("discharge", &softcuda_discharge);
  m.def("set_guard", &softcuda_set_guard);
  m.def("set_queue", &softcuda_set_queue);
  m.def("queued", [](uintptr_t stream) { return softcuda_queued(reinterpret_cast<void*>(stream)); });
  m.def("set_delays", &softcuda_set_delays);
  m.def("set_order", &softcuda_set_order);
  m.def("take_races", [] {
    std::map<std::string, int64_t> found;
    const auto report = [](const char* text, int64_t count, void* data) {
      (*static_cast<decltype(found)*>(data))[text] = count;
    };
    softcuda_take_races(report, &found);
    return found;
  });
  m.def("set_memory", &softcuda_set_memory);
  m.def("set_pinnable", &softcuda_set_pinnable);
  m.def("peak", &softcuda_peak);
  m.def("hold", [](uintptr_t stream, bool held) {
    softcuda_hold(reinterpret_cast<void*>(stream), held);
  });
  m.def("on_wait", [](pybind11::object told) {
    if (listener == nullptr) listener = new pybind11::object;
    *listener = std::move(told);
    softcuda_tell_of_waits(listener->is_none() ? nullptr : &tell);
  });
  m.def("counts", [] {
    auto& of = softcuda_counts();
    return std::map<std::string, int64_t>{
        {"operators", of.operators}, {"kernels", of.kernels}, {"copies in", of.copies_in},
        {"copies out", of.copies_out}, {"copies within", of.copies_within}, {"waits", of.waits},
        {"spins", of.spins}, {"waited for", fallback::operators_now}};
  });
}

}  // namespace softcuda
