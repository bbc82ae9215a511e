// A device that is not there, for torch's own way to add devices (PrivateUse1): memory, streams and
// events of this process. Everything it is given is done later, by the thread of a stream.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace at {
struct Generator;
}

namespace trial {

using Work = std::function<void()>;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;  // every float reads NaN

inline c10::Device device() { return {kType, 0}; }

// How late streams are. With a seed: most work not at all, some a little, some by this much;
// without one, all of it.
struct Delays {
  int copies_us = 0;
  int operators_us = 0;
  uint32_t seed = 0;
};
void set_delays(Delays delays);
Delays delays();

// -- streams --------------------------------------------------------------------------------------

// A thread that does what it is given, in order. The first error is kept for whoever waits next.
class Queue {
 public:
  explicit Queue(c10::StreamId id);

  uint64_t give(Work work);  // its number
  uint64_t given();
  bool done(uint64_t number);
  void pass(uint64_t number);  // returns when it is done
  void wait(uint64_t number);  // the same for the host, which learns of errors
  void be_late(int most_us);   // called by work
  void hold(bool held);        // begins nothing while it is held

 private:
  void run();

  const c10::StreamId id_;
  std::mutex mutex_;
  std::condition_variable change_;
  std::deque<Work> work_;
  std::vector<Work> spent_;  // what they hold goes with a thread of the host, which may need Python
  uint64_t given_ = 0, done_ = 0;
  std::string error_;
  std::mt19937 chance_;
  uint32_t seed_ = 0;
  bool held_ = false;
};

Queue& queue(c10::StreamId id);
c10::StreamId current_stream();  // of the calling thread
c10::StreamId exchange_stream(c10::StreamId id);
c10::StreamId new_stream();
void synchronize_all();

// A place in a stream, and when it was reached.
struct Point {
  Queue* stream = nullptr;
  uint64_t number = 0;
  double reached_ms = 0;
};
std::shared_ptr<Point> mark(c10::StreamId id);

// -- memory ---------------------------------------------------------------------------------------

// Belongs to the stream that was current when it was asked for: released memory is overwritten in
// the order of that stream, as by the next owner that a caching allocator finds for it.
struct Block {
  explicit Block(size_t size);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* data;
  size_t size;
  c10::StreamId owner;
  std::mutex mutex;
  std::set<c10::StreamId> users;  // further streams whose work comes before its release
};

c10::Allocator* memory();
std::shared_ptr<Block> block_of(const c10::DataPtr& pointer);
void set_memory(size_t bytes);      // how much the device has
void set_fraction(double fraction);  // how much of it this process may use
std::pair<size_t, size_t> memory_info();  // free, and all

c10::Allocator* pinned_memory();
void set_pinnable(size_t bytes);
bool is_pinned(const void* data);

// -- random numbers -------------------------------------------------------------------------------

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator host_generator(const at::Generator& of_device);  // what draws in its place

}  // namespace trial
