// The CUDA runtime (libcudart) of machines without a GPU, for torch's own CUDA build. Allocators,
// streams, events, copies and errors of torch are the real ones; below them, a device is memory of
// this process, a stream is a thread that works in order, and kernels are known by name only.
//
// A device address cannot be read by the host: its pages have no rights, and what is "there" lies
// at the same distance in a second mapping.
#include "guard.hpp"
#include "order.hpp"
#include "runtime.hpp"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

using Work = std::function<void()>;

size_t from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// The last error stays with its thread until somebody asks for it: the next launch reports it.
thread_local cudaError_t sticky = cudaSuccess;
cudaError_t said(cudaError_t error) {
  if (error != cudaSuccess) sticky = error;
  return error;
}

std::atomic<int> fatal{cudaSuccess};  // of a stream: from then on every call fails
cudaError_t outcome() { return said(cudaError_t(fatal.load())); }

softcuda::Counts counted;
std::atomic<softcuda::OnWait> on_wait{nullptr};

void host_waits(const char* what) {
  ++counted.waits;
  if (auto tell = on_wait.load()) tell(what);
}

struct Lateness {
  std::atomic<int> copies_us{int(from_environment("SOFTCUDA_COPY_US", 0))};
  std::atomic<int> work_us{int(from_environment("SOFTCUDA_WORK_US", 0))};
  std::atomic<unsigned> seed{unsigned(from_environment("SOFTCUDA_SEED", 0))};
} late;

softcuda::OrderDetector& order() {  // never destroyed: threads outlive main
  static auto* made = new softcuda::OrderDetector(from_environment("SOFTCUDA_ORDER", 0) != 0);
  return *made;
}

softcuda::PageGuard& guard() {
  static auto* made = new softcuda::PageGuard(from_environment("SOFTCUDA_GUARD", 0) != 0);
  return *made;
}

// -- streams --------------------------------------------------------------------------------------

std::atomic<size_t> most_queued{from_environment("SOFTCUDA_QUEUE", 1024)};  // launches of a stream
std::mutex& launches() {
  static auto* made = new std::mutex;
  return *made;
}

class Stream {
 public:
  Stream(int device, int number, int priority)
      : device(device), number(number), priority(priority) {
    std::thread(&Stream::loop, this).detach();
  }

  // A full queue blocks the launch, and with it launches of all threads on all streams.
  uint64_t push(Work work) {
    std::lock_guard launching(launches());
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return queue_.size() < most_queued; });
    queue_.push_back(std::move(work));
    changed_.notify_all();
    return ++pushed_;
  }
  uint64_t end() {
    std::lock_guard lock(mutex_);
    return pushed_;
  }
  size_t queued() {
    std::lock_guard lock(mutex_);
    return queue_.size();
  }
  bool passed(uint64_t position) {
    std::lock_guard lock(mutex_);
    return popped_ >= position;
  }
  void join(uint64_t position) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return popped_ >= position; });
  }
  void hold(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  // By its own thread. With a seed most work is on time and some very late, without one all is late.
  void linger(int most_us) {
    if (most_us <= 0) return;
    const unsigned seed = late.seed;
    int us = most_us;
    if (seed != 0) {
      if (seed != seeded_) draw_.seed((seeded_ = seed) + 7919 * unsigned(number));
      const unsigned chance = draw_() % 16;
      us = chance == 0 ? most_us : chance <= 3 ? most_us / 5 : 0;
    }
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  // The host waits for all that was launched so far.
  void wait_by_host() {
    const auto clock = order().recorded(timeline);
    join(end());
    order().host_waits(clock);
  }

  const int device, number, priority;
  softcuda::OrderDetector::Timeline timeline;

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !held_ && !queue_.empty(); });
      {
        Work work = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        work();
      }
      lock.lock();
      ++popped_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  uint64_t pushed_ = 0, popped_ = 0;
  bool held_ = false;
  std::mt19937 draw_;
  unsigned seeded_ = 0;
};

// -- devices and their memory ---------------------------------------------------------------------

constexpr size_t kRow = 512;                    // what cudaMalloc rounds to
constexpr size_t kPage = size_t{2} << 20;       // of virtual memory management
constexpr size_t kAddresses = size_t{64} << 30;  // more than there is memory: fragments cost none

char* reserve_addresses(int rights) {
  constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, kAddresses, rights, kind, -1, 0);
  if (made == MAP_FAILED) std::abort();
  return static_cast<char*>(made);
}

class Card {
 public:
  explicit Card(int index) : index(index) { streams_.push_back(new Stream(index, 0, 0)); }

  bool has(const void* address) const { return address >= far_ && address < far_ + kAddresses; }
  char* near(const void* address) const { return near_ + (static_cast<const char*>(address) - far_); }

  // Addresses only, at multiples of `step`.
  void* take_addresses(size_t size, size_t step) {
    std::lock_guard lock(mutex_);
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const size_t start = (hole->first + step - 1) / step * step, skipped = start - hole->first;
      if (hole->second < skipped + size) continue;
      const auto [first, room] = *hole;
      holes_.erase(hole);
      if (skipped > 0) holes_[first] = skipped;
      if (room > skipped + size) holes_[start + size] = room - skipped - size;
      return far_ + start;
    }
    return nullptr;
  }
  void return_addresses(void* address, size_t size) {
    std::lock_guard lock(mutex_);
    auto own = holes_.emplace(static_cast<char*>(address) - far_, size).first;
    auto next = std::next(own);
    if (next != holes_.end() && own->first + own->second == next->first) {
      own->second += next->second;
      holes_.erase(next);
    }
    if (own != holes_.begin()) {
      auto before = std::prev(own);
      if (before->first + before->second == own->first) {
        before->second += own->second;
        holes_.erase(own);
      }
    }
  }
  bool charge(size_t size) {
    std::lock_guard lock(mutex_);
    if (used_ + size > total_) return false;
    used_ += size;
    most_ = std::max(most_, used_);
    return true;
  }
  void discharge(size_t size) {
    std::lock_guard lock(mutex_);
    used_ -= size;
  }
  void forget_contents(void* address, size_t size) { std::memset(near(address), 0xFF, size); }

  cudaError_t allocate(void** into, size_t size) {
    size = (size + kRow - 1) / kRow * kRow;
    if (!charge(size)) return cudaErrorMemoryAllocation;
    *into = take_addresses(size, kRow);
    if (*into == nullptr) std::abort();
    forget_contents(*into, size);
    std::lock_guard lock(mutex_);
    sizes_[*into] = size;
    return cudaSuccess;
  }
  cudaError_t release(void* address) {
    size_t size;
    {
      std::lock_guard lock(mutex_);
      auto found = sizes_.find(address);
      if (found == sizes_.end()) return cudaErrorInvalidValue;
      size = found->second;
      sizes_.erase(found);
      used_ -= size;
    }
    madvise(near(address), size, MADV_DONTNEED);  // whole pages only, which is all it is for
    return_addresses(address, size);
    return cudaSuccess;
  }
  void info(size_t* unused, size_t* all) {
    std::lock_guard lock(mutex_);
    *all = total_;
    *unused = total_ > used_ ? total_ - used_ : 0;
  }
  void set_total(size_t bytes) {
    std::lock_guard lock(mutex_);
    total_ = bytes;
  }
  size_t most() {
    std::lock_guard lock(mutex_);
    return std::exchange(most_, used_);
  }

  Stream* add_stream(int priority) {
    std::lock_guard lock(mutex_);
    streams_.push_back(new Stream(index, int(streams_.size()) + 100 * index, priority));
    return streams_.back();
  }
  std::vector<Stream*> streams() {
    std::lock_guard lock(mutex_);
    return streams_;
  }
  Stream* first_stream() { return streams_.front(); }
  void settle() {
    for (auto* stream : streams()) stream->wait_by_host();
  }

  const int index;

 private:
  char* const far_ = reserve_addresses(PROT_NONE);
  char* const near_ = reserve_addresses(PROT_READ | PROT_WRITE);
  std::mutex mutex_;
  size_t total_ = from_environment("SOFTCUDA_MIB", 1024) << 20, used_ = 0, most_ = 0;
  std::map<size_t, size_t> holes_{{0, kAddresses}};
  std::map<void*, size_t> sizes_;
  std::vector<Stream*> streams_;  // never destroyed: events name them
};

std::vector<Card*>& cards() {  // never destroyed: threads outlive main
  static auto* made = [] {
    auto* all = new std::vector<Card*>;
    for (size_t i = 0; i < from_environment("SOFTCUDA_DEVICES", 2); ++i) all->push_back(new Card(int(i)));
    return all;
  }();
  return *made;
}
thread_local int current_card = 0;
Card& card() { return *cards()[current_card]; }
Card* card_with(const void* address) {
  for (auto* one : cards()) {
    if (one->has(address)) return one;
  }
  return nullptr;
}
void* visible(const void* address) {
  auto* owner = card_with(address);
  return owner ? owner->near(address) : const_cast<void*>(address);
}

Stream* stream_of(cudaStream_t handle) {  // the legacy stream and a thread's own are one
  return uintptr_t(handle) <= 2 ? card().first_stream() : reinterpret_cast<Stream*>(handle);
}

// -- pinned memory of the host --------------------------------------------------------------------

class Pinned {
 public:
  struct Piece {
    size_t size;
    bool allocated;
    int device;  // that it is pinned for; kAll
  };
  static constexpr int kAll = -1;
  // Whole pages are pinned: registrations that share a page overlap.
  cudaError_t add(void* address, size_t size, bool allocated, int device) {
    std::lock_guard lock(mutex_);
    auto* start = page_of(address);
    size = page_of(static_cast<char*>(address) + size + kHostPage - 1) - start;
    auto after = pieces_.upper_bound(start);
    const bool behind = after != pieces_.end() && after->first < start + size;
    if (behind || (after != pieces_.begin() && start < end_of(std::prev(after)))) {
      return cudaErrorHostMemoryAlreadyRegistered;
    }
    if (total_ + size > limit_) return cudaErrorMemoryAllocation;
    total_ += size;
    pieces_[start] = {size, allocated, device};
    return cudaSuccess;
  }
  bool remove(void* address, bool allocated) {
    std::lock_guard lock(mutex_);
    auto found = pieces_.find(page_of(address));
    if (found == pieces_.end() || found->second.allocated != allocated) return false;
    total_ -= found->second.size;
    pieces_.erase(found);
    return true;
  }
  bool has(const void* address, int device) {
    std::lock_guard lock(mutex_);
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto after = pieces_.upper_bound(at);
    if (after == pieces_.begin()) return false;
    const auto piece = std::prev(after);
    const int own = piece->second.device;
    return at < end_of(piece) && (own == kAll || own == device);
  }
  void set_limit(size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  static constexpr uintptr_t kHostPage = 4096;
  static char* page_of(void* address) {
    return reinterpret_cast<char*>(uintptr_t(address) & ~(kHostPage - 1));
  }
  static char* end_of(std::map<char*, Piece>::iterator piece) {
    return piece->first + piece->second.size;
  }
  std::mutex mutex_;
  std::map<char*, Piece> pieces_;
  size_t total_ = 0, limit_ = SIZE_MAX;
};
Pinned& pinned() {
  static auto* made = new Pinned;
  return *made;
}

// -- copies ---------------------------------------------------------------------------------------

cudaError_t copy(void* into, const void* from, size_t size, cudaMemcpyKind kind, Stream* stream,
                 bool blocks) {
  if (size == 0) return cudaSuccess;
  const bool in = card_with(into) != nullptr, out = card_with(from) != nullptr;
  const bool wrong = kind == cudaMemcpyHostToDevice     ? !in || out
                     : kind == cudaMemcpyDeviceToHost   ? in || !out
                     : kind == cudaMemcpyDeviceToDevice ? !in || !out
                                                        : false;
  if (wrong) return said(cudaErrorInvalidValue);
  ++(in && out ? counted.copies_within : in ? counted.copies_in : counted.copies_out);
  void* target = visible(into);
  const void* source = visible(from);
  std::shared_ptr<char[]> staged;
  if (!out && !pinned().has(from, stream->device)) {  // pageable memory is read before the call returns
    staged.reset(new char[size]);
    std::memcpy(staged.get(), source, size);
    source = staged.get();
  }
  if (out && !in && !pinned().has(into, stream->device)) blocks = true;  // to pageable memory
  const bool link = in != out;
  const softcuda::Range ranges[] = {{into, size, true}, {from, staged ? 0 : size, false}};
  order().access(stream->timeline, ranges, 2,
                 !link ? "a copy within the device" : in ? "a copy to the device" : "a copy to the host");
  const auto clock = order().recorded(stream->timeline);
  const void* on_host = in ? from : into;  // pinned, if it is guarded
  const bool guarded = link && !staged && !blocks && guard().enabled();
  if (guarded) guard().protect(on_host, size, !in);
  const auto position = stream->push([=] {
    if (link) {
      const bool poisons = late.copies_us > 0 && !(guarded && !in);
      if (poisons) std::memset(target, 0xFF, size);  // what is on its way is not there
      stream->linger(late.copies_us);
    }
    const auto move = [&] { std::memmove(target, source, size); };
    guarded ? guard().run(on_host, size, !in, move) : move();
    (void)staged;
  });
  if (blocks) {
    host_waits(in ? "copy to the device" : "copy to pageable memory");
    stream->join(position);
    order().host_waits(clock);
  }
  return outcome();
}

// -- events ---------------------------------------------------------------------------------------

struct Mark {
  Stream* stream;
  uint64_t position;
  std::atomic<double> at_ms{0};
  softcuda::Clock clock;  // what the event comes after
};
struct Event {
  std::shared_ptr<Mark> get() {
    std::lock_guard lock(mutex);
    return mark;
  }
  unsigned flags;
  std::mutex mutex;
  std::shared_ptr<Mark> mark;
};
Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

double clock_ms() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

}  // namespace

// -- for operators.cpp and tests ------------------------------------------------------------------

API void* softcuda_host_view(const void* address) { return visible(address); }
API void softcuda_push(void* stream, void (*run)(void*), void* data) {
  auto* own = stream_of(static_cast<cudaStream_t>(stream));
  ++counted.operators;
  own->push([=] {
    own->linger(late.work_us);
    run(data);
  });
}
API void softcuda_join(void* stream, bool counts) {
  auto* own = stream_of(static_cast<cudaStream_t>(stream));
  if (counts) host_waits("operator that the host reads");
  own->wait_by_host();
}
API void* softcuda_default_stream(int device) { return cards()[device]->first_stream(); }
API void softcuda_overwrite(void* stream, void* address, size_t size) {
  void* target = visible(address);
  stream_of(static_cast<cudaStream_t>(stream))->push([=] { std::memset(target, 0xFF, size); });
}
API void softcuda_access(void* stream, const softcuda::Range* ranges, size_t count, const char* name) {
  order().access(stream_of(static_cast<cudaStream_t>(stream))->timeline, ranges, count, name);
}
API void softcuda_set_order(bool enabled) { order().enable(enabled); }
API void softcuda_take_races(void (*report)(const char* text, int64_t count, void* data), void* data) {
  for (const auto& [text, count] : order().take_reports()) report(text.c_str(), count, data);
}
API void softcuda_fail() { fatal = cudaErrorLaunchFailure; }
API void softcuda_set_delays(int copies_us, int work_us, unsigned seed) {
  late.copies_us = copies_us;
  late.work_us = work_us;
  late.seed = seed;
}
API size_t softcuda_queued(void* stream) {
  return stream_of(static_cast<cudaStream_t>(stream))->queued();
}
API void softcuda_set_guard(bool enabled) { guard().enable(enabled); }
API void softcuda_set_queue(size_t launches) { most_queued = launches; }
API bool softcuda_charge(int device, size_t bytes) { return cards()[device]->charge(bytes); }
API void softcuda_discharge(int device, size_t bytes) { cards()[device]->discharge(bytes); }
API void softcuda_set_memory(int device, size_t bytes) { cards()[device]->set_total(bytes); }
API size_t softcuda_peak(int device) { return cards()[device]->most(); }
API void softcuda_set_pinnable(size_t bytes) { pinned().set_limit(bytes); }
API void softcuda_hold(void* stream, bool held) { stream_of(static_cast<cudaStream_t>(stream))->hold(held); }
API softcuda::Counts& softcuda_counts() { return counted; }
API void softcuda_tell_of_waits(softcuda::OnWait tell) { on_wait = tell; }

// -- the runtime's own names ----------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = int(cards().size());
  return *count > 0 ? cudaSuccess : said(cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_card;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= int(cards().size())) return said(cudaErrorInvalidDevice);
  current_card = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int device) {  // of a small Ada card
  if (device < 0 || device >= int(cards().size())) return said(cudaErrorInvalidDevice);
  std::memset(of, 0, sizeof *of);
  std::snprintf(of->name, sizeof of->name, "software CUDA %d", device);
  size_t unused;
  cards()[device]->info(&unused, &of->totalGlobalMem);
  const char* capability = std::getenv("SOFTCUDA_CAPABILITY");
  std::sscanf(capability ? capability : "8.9", "%d.%d", &of->major, &of->minor);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  of->uuid.bytes[0] = char(1 + device + (visible ? std::atoi(visible) : 0));
  of->multiProcessorCount = 4;
  of->warpSize = 32;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxThreadsPerMultiProcessor = 1536;
  of->maxBlocksPerMultiProcessor = 24;
  of->maxGridSize[0] = 0x7FFFFFFF;
  of->maxGridSize[1] = of->maxGridSize[2] = 0xFFFF;
  of->regsPerBlock = of->regsPerMultiprocessor = 1 << 16;
  of->sharedMemPerBlock = 48 << 10;
  of->sharedMemPerBlockOptin = 99 << 10;
  of->sharedMemPerMultiprocessor = 100 << 10;
  of->l2CacheSize = 8 << 20;
  of->memoryBusWidth = 128;
  of->asyncEngineCount = 2;
  of->concurrentKernels = of->unifiedAddressing = of->canMapHostMemory = 1;
  of->textureAlignment = of->texturePitchAlignment = 512;
  of->memPitch = 0x7FFFFFFF;
  of->pciBusID = device + 1;
  of->integrated = std::getenv("SOFTCUDA_INTEGRATED") != nullptr;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  cudaDeviceProp of;
  if (const auto error = cudaGetDeviceProperties(&of, device)) return error;
  const std::map<int, int> known{
      {cudaDevAttrComputeCapabilityMajor, of.major},
      {cudaDevAttrComputeCapabilityMinor, of.minor},
      {cudaDevAttrMultiProcessorCount, of.multiProcessorCount},
      {cudaDevAttrMaxThreadsPerBlock, of.maxThreadsPerBlock},
      {cudaDevAttrMaxThreadsPerMultiProcessor, of.maxThreadsPerMultiProcessor},
      {cudaDevAttrWarpSize, of.warpSize},
      {cudaDevAttrMaxSharedMemoryPerBlock, int(of.sharedMemPerBlock)},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(of.sharedMemPerBlockOptin)},
      {cudaDevAttrUnifiedAddressing, 1},
  };
  const auto found = known.find(which);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {  // as consumer cards
  *can = 0;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* into, int size, int device) {
  std::snprintf(into, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  ++counted.spins;
  host_waits("cudaDeviceSynchronize, spinning");
  card().settle();
  return outcome();
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// errors

namespace {
struct Words {
  const char *name, *text;
};
const std::map<int, Words> kErrors{
    {cudaSuccess, {"cudaSuccess", "no error"}},
    {cudaErrorInvalidValue, {"cudaErrorInvalidValue", "invalid argument"}},
    {cudaErrorMemoryAllocation, {"cudaErrorMemoryAllocation", "out of memory"}},
    {cudaErrorNoDevice, {"cudaErrorNoDevice", "no CUDA-capable device is detected"}},
    {cudaErrorInvalidDevice, {"cudaErrorInvalidDevice", "invalid device ordinal"}},
    {cudaErrorNotReady, {"cudaErrorNotReady", "device not ready"}},
    {cudaErrorInvalidResourceHandle, {"cudaErrorInvalidResourceHandle", "invalid resource handle"}},
    {cudaErrorHostMemoryAlreadyRegistered,
     {"cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"}},
    {cudaErrorHostMemoryNotRegistered,
     {"cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"}},
    {cudaErrorLaunchFailure, {"cudaErrorLaunchFailure", "unspecified launch failure"}},
    {cudaErrorNotSupported, {"cudaErrorNotSupported", "operation not supported"}},
};
Words words(cudaError_t error) {
  const auto found = kErrors.find(error);
  return found == kErrors.end() ? Words{"cudaErrorUnknown", "unknown error"} : found->second;
}
}  // namespace
API const char* cudaGetErrorName(cudaError_t error) { return words(error).name; }
API const char* cudaGetErrorString(cudaError_t error) { return words(error).text; }
API cudaError_t cudaGetLastError() { return std::exchange(sticky, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return sticky; }

// memory

API cudaError_t cudaMalloc(void** into, size_t size) {
  *into = nullptr;
  return size == 0 ? cudaSuccess : said(card().allocate(into, size));
}
API cudaError_t cudaFree(void* address) {
  if (address == nullptr) return cudaSuccess;
  auto* owner = card_with(address);
  if (owner == nullptr) return said(cudaErrorInvalidValue);
  host_waits("cudaFree");
  owner->settle();
  return said(owner->release(address));
}
API cudaError_t cudaMallocAsync(void** into, size_t size, cudaStream_t) {
  return cudaMalloc(into, size);
}
API cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
API cudaError_t cudaMemGetInfo(size_t* unused, size_t* all) {
  card().info(unused, all);
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** into, size_t size, unsigned) {
  *into = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  const auto error = *into ? pinned().add(*into, size, true, Pinned::kAll) : cudaErrorMemoryAllocation;
  if (error != cudaSuccess) std::free(std::exchange(*into, nullptr));
  return said(error);
}
API cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) return cudaSuccess;
  for (auto* one : cards()) one->settle();
  if (!pinned().remove(address, true)) return said(cudaErrorInvalidValue);
  std::free(address);
  return cudaSuccess;
}
// Without its flag, for the device that is current: stricter than devices with one address space.
API cudaError_t cudaHostRegister(void* address, size_t size, unsigned flags) {
  const bool portable = (flags & cudaHostRegisterPortable) != 0;
  return said(pinned().add(address, size, false, portable ? Pinned::kAll : current_card));
}
API cudaError_t cudaHostUnregister(void* address) {
  for (auto* one : cards()) one->settle();
  return pinned().remove(address, false) ? cudaSuccess : said(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* address) {
  std::memset(of, 0, sizeof *of);
  of->type = cudaMemoryTypeUnregistered;
  of->device = -2;
  if (auto* owner = card_with(address)) {
    of->type = cudaMemoryTypeDevice;
    of->device = owner->index;
    of->devicePointer = const_cast<void*>(address);
  } else if (pinned().has(address, current_card)) {
    of->type = cudaMemoryTypeHost;
    of->device = current_card;
    of->hostPointer = of->devicePointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* into, const void* from, size_t size, cudaMemcpyKind kind,
                                cudaStream_t stream) {
  return copy(into, from, size, kind, stream_of(stream), false);
}
API cudaError_t cudaMemcpy(void* into, const void* from, size_t size, cudaMemcpyKind kind) {
  return copy(into, from, size, kind, stream_of(nullptr), true);
}
API cudaError_t cudaMemcpyPeerAsync(void* into, int, const void* from, int, size_t size,
                                    cudaStream_t stream) {
  return copy(into, from, size, cudaMemcpyDefault, stream_of(stream), false);
}
API cudaError_t cudaMemcpy2DAsync(void* into, size_t into_row, const void* from, size_t from_row,
                                  size_t width, size_t rows, cudaMemcpyKind kind,
                                  cudaStream_t stream) {
  auto* target = static_cast<char*>(into);
  auto* source = static_cast<const char*>(from);
  auto error = cudaSuccess;
  for (size_t row = 0; row < rows && error == cudaSuccess; ++row) {
    error = copy(target + row * into_row, source + row * from_row, width, kind, stream_of(stream),
                 false);
  }
  return error;
}
API cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t stream) {
  void* target = visible(address);
  const softcuda::Range range{address, size, true};
  order().access(stream_of(stream)->timeline, &range, 1, "memset");
  stream_of(stream)->push([=] { std::memset(target, value, size); });
  return outcome();
}
API cudaError_t cudaMemset(void* address, int value, size_t size) {
  return cudaMemsetAsync(address, value, size, nullptr);
}

// streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned, int priority) {
  *made = reinterpret_cast<cudaStream_t>(card().add_stream(priority));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithPriority(made, 0, 0);
}
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  auto* own = stream_of(stream);
  const auto clock = order().recorded(own->timeline);
  if (!own->passed(own->end())) return said(cudaErrorNotReady);
  order().host_waits(clock);
  return outcome();
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++counted.spins;
  host_waits("cudaStreamSynchronize, spinning");
  stream_of(stream)->wait_by_host();
  return outcome();
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                         unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                         const cudaGraphEdgeData**, size_t*) {
  return cudaStreamIsCapturing(stream, status);
}
#else
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long*, cudaGraph_t*,
                                            const cudaGraphNode_t**, size_t*) {
  return cudaStreamIsCapturing(stream, status);
}
#endif
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  stream_of(stream)->push([=] { function(data); });
  return outcome();
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                      void* data, unsigned) {
  stream_of(stream)->push([=] { function(stream, cudaSuccess, data); });
  return outcome();
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  auto* event = new Event;
  event->flags = flags;
  *made = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream_of(stream);
  mark->clock = order().recorded(mark->stream->timeline);
  mark->position = mark->stream->push([mark] { mark->at_ms = clock_ms(); });
  std::lock_guard lock(event_of(event)->mutex);
  event_of(event)->mark = std::move(mark);
  return outcome();
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto mark = event_of(event)->get();
  if (!mark) return outcome();
  if (!mark->stream->passed(mark->position)) return said(cudaErrorNotReady);
  order().host_waits(mark->clock);
  return outcome();
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const bool blocking = (event_of(event)->flags & cudaEventBlockingSync) != 0;
  if (!blocking) ++counted.spins;
  host_waits(blocking ? "event" : "event, spinning");
  if (const auto mark = event_of(event)->get()) {
    mark->stream->join(mark->position);
    order().host_waits(mark->clock);
  }
  return outcome();
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto mark = event_of(event)->get();
  if (mark && mark->stream != stream_of(stream)) {
    order().stream_waits(stream_of(stream)->timeline, mark->clock);
    stream_of(stream)->push([mark] { mark->stream->join(mark->position); });
  }
  return outcome();
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  const auto from = event_of(first)->get(), to = event_of(second)->get();
  const unsigned untimed = (event_of(first)->flags | event_of(second)->flags) & cudaEventDisableTiming;
  if (!from || !to || untimed) return said(cudaErrorInvalidResourceHandle);
  for (const auto& mark : {from, to}) {
    if (!mark->stream->passed(mark->position)) return said(cudaErrorNotReady);
  }
  *ms = float(to->at_ms - from->at_ms);
  return cudaSuccess;
}

// virtual memory management, by which expandable segments grow: names of the driver

namespace {
struct Physical {
  int device;
  size_t size;
};
int address_reserve(void** address, size_t size, size_t, void*, unsigned long long) {
  *address = card().take_addresses(size, kPage);
  return *address == nullptr ? 2 : 0;
}
int address_free(void* address, size_t size) {
  card_with(address)->return_addresses(address, size);
  return 0;
}
int memory_create(Physical** made, size_t size, const void*, unsigned long long) {
  if (!card().charge(size)) return 2;  // CUDA_ERROR_OUT_OF_MEMORY
  *made = new Physical{current_card, size};
  return 0;
}
int memory_release(Physical* of) {
  cards()[of->device]->discharge(of->size);
  delete of;
  return 0;
}
int memory_map(void* address, size_t size, size_t, Physical*, unsigned long long) {
  card_with(address)->forget_contents(address, size);
  return 0;
}
int memory_unmap(void* address, size_t) {
  card_with(address)->settle();
  return 0;
}
int memory_granularity(size_t* size, const void*, int) {
  *size = kPage;
  return 0;
}
int device_get(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int device_attribute(int* value, int, int) {
  *value = 0;
  return 0;
}
int driver_error(int, const char** text) {
  *text = "driver error";
  return 0;
}
int driver_succeeds() { return 0; }
int driver_refuses() { return 801; }
const std::map<std::string, void*>& driver_names() {
  static const std::map<std::string, void*> names{
      {"cuMemAddressReserve", (void*)address_reserve}, {"cuMemAddressFree", (void*)address_free},
      {"cuMemCreate", (void*)memory_create}, {"cuMemRelease", (void*)memory_release},
      {"cuMemMap", (void*)memory_map}, {"cuMemUnmap", (void*)memory_unmap},
      {"cuMemSetAccess", (void*)driver_succeeds}, {"cuGetErrorString", (void*)driver_error},
      {"cuMemGetAllocationGranularity", (void*)memory_granularity},
      {"cuDeviceGet", (void*)device_get}, {"cuDeviceGetAttribute", (void*)device_attribute},
  };
  return names;
}
}  // namespace
API void* softcuda_driver(const char* name) {  // for libcuda, which older versions of torch ask
  const auto found = driver_names().find(name);
  return found == driver_names().end() ? (void*)driver_refuses : found->second;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = softcuda_driver(name);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#if CUDART_VERSION < 13000
API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                        cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}
#endif

// kernels: torch's own, which no operator of operators.cpp has replaced. None runs.

namespace {
std::mutex kernels_mutex;
std::map<const void*, std::string>& kernels() {
  static auto* made = new std::map<const void*, std::string>;
  return *made;
}
cudaError_t refuse(const void* kernel) {
  ++counted.kernels;
  if (std::getenv("SOFTCUDA_LOG") != nullptr) {
    std::lock_guard lock(kernels_mutex);
    std::fprintf(stderr, "software CUDA: no kernel runs: %s\n", kernels()[kernel].c_str());
  }
  return said(cudaErrorNotSupported);  // better than a wrong number
}
struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Launch> launching;
}  // namespace
API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
  std::lock_guard lock(kernels_mutex);
  kernels()[host] = name;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  launching.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Launch last = launching.back();
  launching.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t,
                                            cudaStream_t) {
  return refuse(kernel);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse(kernel);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  std::memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 64;
  of->ptxVersion = of->binaryVersion = 89;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                       size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                              int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}
