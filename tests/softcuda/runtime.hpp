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
  std::atomic<int64_t> spins{0};  // of those, the ones in which a real driver polls in a loop
};

// Bytes that an operation reads or writes.
struct Range {
  const void* start;
  size_t size;
  bool writes;
};

using OnWait = void (*)(const char* what);  // called by the thread that is about to wait

}  // namespace softcuda

API void* softcuda_host_view(const void* address);  // where the host finds what is at a device's address
API void softcuda_push(void* stream, void (*run)(void*), void* data);
API void softcuda_join(void* stream, bool counts);
API void* softcuda_default_stream(int device);
API void softcuda_overwrite(void* stream, void* address, size_t size);  // by NaN, in the stream's order
API void softcuda_fail();                                               // for good, as a kernel that crashed
API void softcuda_set_delays(int copies_us, int work_us, unsigned seed);
// An operation on a stream that accesses these ranges is launched now. `name` is not copied.
API void softcuda_access(void* stream, const softcuda::Range* ranges, size_t count, const char* name);
API void softcuda_set_order(bool enabled);
// Calls `report` for each kind of unordered access since the last call, with how often it was found.
API void softcuda_take_races(void (*report)(const char* text, int64_t count, void* data), void* data);
API void softcuda_set_guard(bool enabled);     // of pages that copies in flight use: guard.hpp
API size_t softcuda_queued(void* stream);      // launches that it has not begun
API void softcuda_set_queue(size_t launches);  // that a stream holds before a launch blocks
// Memory that a library takes outside torch's allocator; false: there is not so much.
API bool softcuda_charge(int device, size_t bytes);
API void softcuda_discharge(int device, size_t bytes);
API void softcuda_set_memory(int device, size_t bytes);
API size_t softcuda_peak(int device);  // bytes since the last call
API void softcuda_set_pinnable(size_t bytes);
API void softcuda_hold(void* stream, bool held);  // a stream begins nothing while it is held
API softcuda::Counts& softcuda_counts();
API void softcuda_tell_of_waits(softcuda::OnWait tell);
