// Streams, memory and random numbers, and what torch asks of them.
#include "trial.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

namespace trial {
namespace {

constexpr size_t kAlign = 64;
constexpr int kStreams = 12;  // that are handed out in turn

std::mutex delays_mutex;
Delays delays_now;

double now_ms() {
  using std::chrono::steady_clock;
  return std::chrono::duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "there is one trial device, and this is number ", int(index));
}

}  // namespace

void set_delays(Delays delays) {
  std::lock_guard lock(delays_mutex);
  delays_now = delays;
}

Delays delays() {
  std::lock_guard lock(delays_mutex);
  return delays_now;
}

// -- streams --------------------------------------------------------------------------------------

Queue::Queue(c10::StreamId id) : id_(id) { std::thread([this] { run(); }).detach(); }

uint64_t Queue::give(Work work) {
  std::vector<Work> spent;
  std::lock_guard lock(mutex_);
  spent.swap(spent_);  // gone after the lock: `spent` was made before it
  work_.push_back(std::move(work));
  change_.notify_all();
  return ++given_;
}

uint64_t Queue::given() {
  std::lock_guard lock(mutex_);
  return given_;
}

bool Queue::done(uint64_t number) {
  std::lock_guard lock(mutex_);
  return done_ >= number;
}

void Queue::pass(uint64_t number) {
  std::unique_lock lock(mutex_);
  change_.wait(lock, [&] { return done_ >= number; });
}

void Queue::wait(uint64_t number) {
  pass(number);
  std::string error;
  {
    std::lock_guard lock(mutex_);
    error.swap(error_);
  }
  TORCH_CHECK(error.empty(), "trial device: ", error);
}

void Queue::be_late(int most_us) {
  if (most_us == 0) return;
  if (const uint32_t seed = delays().seed; seed != seed_) {
    seed_ = seed;
    chance_.seed(seed + 97 * static_cast<uint32_t>(id_));
  }
  const auto draw = seed_ == 0 ? 0 : chance_() % 16;
  const int us = draw == 0 ? most_us : draw < 4 ? most_us / 6 : 0;
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Queue::hold(bool held) {
  std::lock_guard lock(mutex_);
  held_ = held;
  change_.notify_all();
}

void Queue::run() {
  at::init_num_threads();
  std::unique_lock lock(mutex_);
  while (true) {
    change_.wait(lock, [&] { return !held_ && !work_.empty(); });
    Work work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    std::string error;
    try {
      work();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    lock.lock();
    if (error_.empty()) error_ = error;
    spent_.push_back(std::move(work));
    ++done_;
    change_.notify_all();
  }
}

namespace {

// Never destroyed: their threads end with the process.
struct Streams {
  std::mutex mutex;
  std::map<c10::StreamId, Queue*> queues;
  int handed_out = 0;
};

Streams& streams() {
  static auto* made = new Streams;
  return *made;
}

thread_local c10::StreamId thread_stream = 0;

}  // namespace

Queue& queue(c10::StreamId id) {
  auto& all = streams();
  std::lock_guard lock(all.mutex);
  Queue*& found = all.queues[id];
  if (found == nullptr) found = new Queue(id);
  return *found;
}

c10::StreamId current_stream() { return thread_stream; }

c10::StreamId exchange_stream(c10::StreamId id) { return std::exchange(thread_stream, id); }

c10::StreamId new_stream() {
  auto& all = streams();
  std::lock_guard lock(all.mutex);
  return 1 + all.handed_out++ % kStreams;  // 0 is the default stream
}

void synchronize_all() {
  std::vector<Queue*> queues;
  {
    auto& all = streams();
    std::lock_guard lock(all.mutex);
    for (auto& [id, found] : all.queues) queues.push_back(found);
  }
  for (Queue* found : queues) found->wait(found->given());
}

std::shared_ptr<Point> mark(c10::StreamId id) {
  auto point = std::make_shared<Point>();
  point->stream = &queue(id);
  point->number = point->stream->give([point] { point->reached_ms = now_ms(); });
  return point;
}

// -- memory ---------------------------------------------------------------------------------------

Block::Block(size_t size)
    : data(static_cast<char*>(std::aligned_alloc(kAlign, (size + kAlign - 1) / kAlign * kAlign))),
      size(size), owner(current_stream()) {}

Block::~Block() { std::free(data); }

namespace {

void poison(const std::shared_ptr<Block>& block) {
  queue(block->owner).give([block] { std::memset(block->data, kPoison, block->size); });
}

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, device()};
    {
      std::lock_guard lock(mutex_);
      auto& now = stats_.allocated_bytes[0];
      if (static_cast<size_t>(now.current) + size > limit_) {
        ++stats_.num_ooms;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "trial device out of memory: tried to allocate ",
                         size, " bytes, ", now.current, " of ", limit_, " are in use");
      }
      now.increase(size);
      stats_.reserved_bytes[0].increase(size);
    }
    auto block = std::make_shared<Block>(size);
    poison(block);
    return {block->data, new std::shared_ptr<Block>(block), &release, device()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "trial device: memory is copied by streams");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto block = block_of(pointer); block && stream.id() != block->owner) {
      std::lock_guard lock(block->mutex);
      block->users.insert(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_accumulated();
    stats_.reserved_bytes[0].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
    stats_.reserved_bytes[0].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard lock(mutex_);
    const auto used = static_cast<size_t>(stats_.allocated_bytes[0].current);
    return {all_ > used ? all_ - used : 0, all_};
  }

  void set(size_t all, double fraction) {
    std::lock_guard lock(mutex_);
    if (all > 0) all_ = all;
    limit_ = static_cast<size_t>(static_cast<double>(all_) * fraction + 0.5);
  }

 private:
  static void release(void* context);

  std::mutex mutex_;
  size_t all_ = size_t{1} << 30, limit_ = all_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Memory& the_memory() {
  static auto* made = new Memory;
  return *made;
}

void Memory::release(void* context) {
  std::unique_ptr<std::shared_ptr<Block>> held(static_cast<std::shared_ptr<Block>*>(context));
  auto block = *held;
  for (const auto user : block->users) {
    queue(block->owner).give([point = mark(user)] { point->stream->pass(point->number); });
  }
  poison(block);
  auto& own = the_memory();
  std::lock_guard lock(own.mutex_);
  own.stats_.allocated_bytes[0].decrease(block->size);
  own.stats_.reserved_bytes[0].decrease(block->size);
}

// Host memory that counts as pinned. Not by page: that is for whoever asks to see to.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(used_ + size <= limit_, "trial device: cannot pin ", size, " bytes, ", used_,
                " of ", limit_, " are pinned");
    char* data = static_cast<char*>(std::aligned_alloc(kAlign, (size / kAlign + 1) * kAlign));
    used_ += size;
    pieces_[data] = size;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* into, const void* from, std::size_t size) const override {
    std::memcpy(into, from, size);
  }

  bool holds(const void* data) {
    std::lock_guard lock(mutex_);
    auto after = pieces_.upper_bound(static_cast<const char*>(data));
    if (after == pieces_.begin()) return false;
    const auto& [start, size] = *std::prev(after);
    return static_cast<const char*>(data) < start + size;
  }

  void limit(size_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::map<const char*, size_t> pieces_;
  size_t used_ = 0, limit_ = SIZE_MAX;
};

Pinned& the_pinned() {
  static auto* made = new Pinned;
  return *made;
}

void Pinned::release(void* context) {
  auto& own = the_pinned();
  std::lock_guard lock(own.mutex_);
  const auto found = own.pieces_.find(static_cast<const char*>(context));
  own.used_ -= found->second;
  own.pieces_.erase(found);
  std::free(context);
}

}  // namespace

c10::Allocator* memory() { return &the_memory(); }

std::shared_ptr<Block> block_of(const c10::DataPtr& pointer) {
  auto* held = static_cast<std::shared_ptr<Block>*>(pointer.get_context());
  return held == nullptr ? nullptr : *held;
}

void set_memory(size_t bytes) { the_memory().set(bytes, 1.0); }
void set_fraction(double fraction) { the_memory().set(0, fraction); }
std::pair<size_t, size_t> memory_info() { return the_memory().getMemoryInfo(0); }

c10::Allocator* pinned_memory() { return &the_pinned(); }
void set_pinnable(size_t bytes) { the_pinned().limit(bytes); }
bool is_pinned(const void* data) { return the_pinned().holds(data); }

// -- random numbers -------------------------------------------------------------------------------

namespace {

// One of the CPU's draws in its place.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator inner)
      : GeneratorImpl(device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator inner;

 private:
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
};

}  // namespace

const at::Generator& default_generator() {
  static auto* made = new at::Generator(new_generator());
  return *made;
}

at::Generator new_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator());
}

at::Generator host_generator(const at::Generator& of_device) {
  return static_cast<Generator*>(of_device.unsafeGetGeneratorImpl())->inner;
}

// -- what torch asks ------------------------------------------------------------------------------

namespace {

struct Event {
  std::shared_ptr<Point> point;
};

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device other) const override {
    check_device(other.index());
    return device();
  }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device other) const override { check_device(other.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& found = queue(stream.id());
    return found.done(found.given());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& found = queue(stream.id());
    found.wait(found.given());
  }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_all(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->point = mark(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto point = static_cast<Event*>(event)->point;
    queue(stream.id()).give([point] { point->stream->pass(point->number); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto& point = static_cast<Event*>(event)->point;
    return point->stream->done(point->number);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto point = static_cast<Event*>(event)->point;
    point->stream->wait(point->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto& a = static_cast<Event*>(first)->point;
    const auto& b = static_cast<Event*>(second)->point;
    TORCH_CHECK(a->stream->done(a->number) && b->stream->done(b->number),
                "trial device: both events must have come before the time between them is known");
    return b->reached_ms - a->reached_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    the_memory().recordStream(pointer, stream);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_device(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    check_device(index);
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = memory()->allocate(size);
    auto from = block_of(storage.data_ptr());
    auto into = block_of(made);
    if (from && into) {
      queue(current_stream()).give([from, into] {
        std::memcpy(into->data, from->data, std::min(from->size, into->size));
      });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const bool registered = [] {
  c10::SetAllocator(kType, memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace trial
