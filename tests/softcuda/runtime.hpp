// What software CUDA's runtime offers besides CUDA's own names.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#define API extern "C" __attribute__((visibility("default")))

namespace softcuda {

struct Counts {
  std::atomic<int64_t> operators{0};  // given to a stream
  std::atomic<int64_t> kernels{0};    // of torch's own, which do not run
  std::atomic<int64_t> copies_in{0}, copies_out{0}, copies_within{0};
  std::atomic<int64_t> waits{0};  // of the host, for a stream
  std::atomic<int64_t> spins{0};  // of those: for events that a real driver would wait for in a loop
};

using OnWait = void (*)(const char* what);  // called by the thread that is about to wait

}  // namespace softcuda

API void* softcuda_host_view(const void* address);  // where the host finds what is at a device's address
API void softcuda_push(void* stream, void (*run)(void*), void* data);
API void softcuda_join(void* stream, bool counts);
API void softcuda_overwrite(void* stream, void* address, size_t size);  // by NaN, in the stream's order
API void softcuda_fail();                                               // for good, as a kernel that crashed
API void softcuda_set_delays(int copies_us, int work_us, unsigned seed);
API void softcuda_set_memory(int device, size_t bytes);
API size_t softcuda_peak(int device);  // bytes since the last call
API void softcuda_set_pinnable(size_t bytes);
API void softcuda_hold(void* stream, bool held);  // a stream begins nothing while it is held
API softcuda::Counts& softcuda_counts();
API void softcuda_tell_of_waits(softcuda::OnWait tell);
