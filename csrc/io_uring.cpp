// io_uring by raw system calls. One thread owns the ring: it alone fills the submission queue,
// enters the kernel and reaps completions, so the ring needs no lock and callers never wait for the
// kernel. Callers append pieces to a list and signal an eventfd that the ring itself polls.
#include <errno.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "io_backend.hpp"
#include "io_error.hpp"
#include "thread_signals.hpp"

namespace lohan {
namespace {

IoError uring_error(const char* what, int error) {
  return IoError(std::string("io_uring: ") + what + " failed: " + errno_text(error) +
                 "; use the 'threads' engine on this system");
}

// Members are released in reverse order of construction, even if construction fails half-way.
struct Fd {
  int fd = -1;
  ~Fd() {
    if (fd >= 0) ::close(fd);
  }
};

struct Mapping {
  void* at = MAP_FAILED;
  size_t bytes = 0;
  void map(int fd, size_t size, off_t what) {
    at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (at == MAP_FAILED) throw uring_error("mmap", errno);
    bytes = size;
  }
  template <class T>
  T* field(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(at) + offset);
  }
  ~Mapping() {
    if (at != MAP_FAILED) munmap(at, bytes);
  }
};

// The shared rings. Kernel and user space each own one end of a ring. Values that the other side
// writes are loaded with acquire, values that it reads are stored with release.
class Ring {
 public:
  explicit Ring(unsigned entries) {
    io_uring_params params{};
    fd_.fd = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
    if (fd_.fd < 0) throw uring_error("setup", errno);
    check_opcodes();
    const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_.map(fd_.fd, sq_bytes > cq_bytes ? sq_bytes : cq_bytes, IORING_OFF_SQ_RING);
    sqes_.map(fd_.fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    sq_head_ = rings_.field<uint32_t>(params.sq_off.head);
    sq_tail_ = rings_.field<uint32_t>(params.sq_off.tail);
    sq_mask_ = *rings_.field<uint32_t>(params.sq_off.ring_mask);
    sq_array_ = rings_.field<uint32_t>(params.sq_off.array);
    cq_head_ = rings_.field<uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.field<uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.field<uint32_t>(params.cq_off.ring_mask);
    cqes_ = rings_.field<io_uring_cqe>(params.cq_off.cqes);
  }

  // The caller keeps the number in flight below the number of entries, so there is always room.
  void push(const io_uring_sqe& sqe) {
    const uint32_t tail = *sq_tail_, slot = tail & sq_mask_;
    *(sqes_.field<io_uring_sqe>(0) + slot) = sqe;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  }

  // Submit the pushed entries and sleep until something completes; return 0 or an errno.
  int submit_and_wait() {
    const uint32_t waiting = *sq_tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
    const long result = syscall(__NR_io_uring_enter, fd_.fd, waiting, 1, IORING_ENTER_GETEVENTS,
                                nullptr, 0);
    return result >= 0 || errno == EINTR ? 0 : errno;
  }

  // Remove an entry that was pushed but not taken by the kernel, the last one first.
  bool withdraw(uint64_t& user_data) {
    const uint32_t tail = *sq_tail_;
    if (tail == __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE)) return false;
    user_data = (sqes_.field<io_uring_sqe>(0) + ((tail - 1) & sq_mask_))->user_data;
    __atomic_store_n(sq_tail_, tail - 1, __ATOMIC_RELEASE);
    return true;
  }

  bool pop(io_uring_cqe& cqe) {
    const uint32_t head = *cq_head_;
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    cqe = cqes_[head & cq_mask_];
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
  }

 private:
  // Plain reads and writes, and this query, exist since Linux 5.6.
  void check_opcodes() {
    constexpr size_t kOps = 256, kBytes = sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op);
    alignas(io_uring_probe) char space[kBytes] = {};
    auto* probe = reinterpret_cast<io_uring_probe*>(space);
    if (syscall(__NR_io_uring_register, fd_.fd, IORING_REGISTER_PROBE, probe, kOps) != 0)
      throw uring_error("probe (Linux 5.6 or later is needed)", errno);
    auto supported = [&](unsigned op) {
      io_uring_probe_op answer;
      memcpy(&answer, space + sizeof *probe + op * sizeof answer, sizeof answer);
      return op <= probe->last_op && (answer.flags & IO_URING_OP_SUPPORTED);
    };
    if (!supported(IORING_OP_READ) || !supported(IORING_OP_WRITE) || !supported(IORING_OP_POLL_ADD))
      throw uring_error("probe of read, write and poll", EOPNOTSUPP);
  }

  Fd fd_;  // declared first, so that it is closed last
  Mapping rings_, sqes_;
  uint32_t *sq_head_, *sq_tail_, *sq_array_, *cq_head_, *cq_tail_;
  uint32_t sq_mask_, cq_mask_;
  io_uring_cqe* cqes_;
};

class UringBackend : public Backend {
 public:
  UringBackend(unsigned depth, Advance advance)
      : advance_(std::move(advance)), ring_(depth + 1), slots_(depth) {
    wake_.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_.fd < 0) throw uring_error("eventfd", errno);
    for (unsigned i = 0; i < depth; ++i) free_slots_.push_back(i);
    BlockedSignals blocked;  // inherited by the thread
    thread_ = std::thread([this] { loop(); });
  }

  ~UringBackend() override { stop(); }

  void submit(std::vector<Piece> pieces) override {
    {
      std::lock_guard lock(mutex_);
      for (Piece& piece : pieces) incoming_.push_back(std::move(piece));
    }
    wake();
  }

  void stop() override {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake();
    thread_.join();
  }

 private:
  static constexpr uint64_t kWake = ~0ull;

  void wake() {
    const uint64_t one = 1;
    ssize_t result;
    do {
      result = ::write(wake_.fd, &one, sizeof one);
    } while (result < 0 && errno == EINTR);
    // EAGAIN means that the counter is full, so that a wake-up is pending anyway.
    if (result < 0 && errno != EAGAIN) throw uring_error("write to eventfd", errno);
  }

  void loop() {
    poll_wake();
    while (!stop_seen_ || !queue_.empty() || in_flight() > 0) {
      issue();
      const int error = ring_.submit_and_wait();
      // EAGAIN and EBUSY mean that the kernel lacks memory or completion slots; reaping helps.
      if (error == EAGAIN || error == EBUSY) {
        pause();
      } else if (error != 0) {
        return fail_queued(error);
      }
      reap();
    }
  }

  size_t in_flight() const { return slots_.size() - free_slots_.size(); }

  static void pause() {
    const timespec one_ms{0, 1000000};
    nanosleep(&one_ms, nullptr);
  }

  void poll_wake() {
    io_uring_sqe sqe{};
    sqe.opcode = IORING_OP_POLL_ADD;
    sqe.fd = wake_.fd;
    sqe.poll_events = POLLIN;
    sqe.user_data = kWake;
    ring_.push(sqe);
  }

  // The counter is cleared before the list is taken, so that later additions signal again.
  void take_incoming() {
    uint64_t count;
    while (::read(wake_.fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
    std::lock_guard lock(mutex_);
    for (Piece& piece : incoming_) queue_.push_back(std::move(piece));
    incoming_.clear();
    stop_seen_ = stopping_;
  }

  void issue() {
    while (!queue_.empty() && !free_slots_.empty()) {
      Piece piece = std::move(queue_.front());
      queue_.pop_front();
      if (piece.pointless()) {
        advance_(piece, -ECANCELED);
        continue;
      }
      const unsigned slot = free_slots_.back();
      free_slots_.pop_back();
      io_uring_sqe sqe{};
      sqe.opcode = piece.ticket->write ? IORING_OP_WRITE : IORING_OP_READ;
      sqe.fd = piece.fd;
      sqe.off = piece.offset + piece.done;
      sqe.addr = reinterpret_cast<uintptr_t>(piece.data + piece.done);
      sqe.len = static_cast<uint32_t>(piece.length - piece.done);
      sqe.user_data = slot;
      ring_.push(sqe);
      slots_[slot] = std::move(piece);
    }
  }

  void reap() {
    io_uring_cqe cqe;
    bool woken = false, refused = false;
    while (ring_.pop(cqe)) {
      if (cqe.user_data == kWake) {
        woken = true;
        continue;
      }
      refused |= cqe.res == -EAGAIN;
      complete(cqe.user_data, cqe.res);
    }
    if (woken) {
      take_incoming();
      poll_wake();
    }
    if (refused && in_flight() == 0) pause();
  }

  void complete(uint64_t user_data, int64_t result) {
    const auto slot = static_cast<unsigned>(user_data);
    Piece piece = std::move(slots_[slot]);
    free_slots_.push_back(slot);
    if (advance_(piece, result)) queue_.push_front(std::move(piece));
  }

  // The ring accepts no more entries. Entries that the kernel has not taken fail now; the others
  // still complete, without another call, and only then are their buffers free.
  void fail_queued(int error) {
    constexpr int kLookAgainMs = 10;
    uint64_t user_data;
    while (ring_.withdraw(user_data))
      if (user_data != kWake) complete(user_data, -error);
    for (;;) {
      for (Piece& piece : queue_) advance_(piece, -error);
      queue_.clear();
      if (stop_seen_) return;
      pollfd wait{wake_.fd, POLLIN, 0};
      poll(&wait, 1, in_flight() > 0 ? kLookAgainMs : -1);
      take_incoming();
      io_uring_cqe cqe;
      while (ring_.pop(cqe))
        if (cqe.user_data != kWake) complete(cqe.user_data, cqe.res);
    }
  }

  Advance advance_;
  Ring ring_;
  Fd wake_;
  std::mutex mutex_;  // guards incoming_ and stopping_; everything else belongs to the thread
  std::vector<Piece> incoming_;
  bool stopping_ = false;
  bool stop_seen_ = false;
  std::deque<Piece> queue_;
  std::vector<Piece> slots_;
  std::vector<unsigned> free_slots_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring(unsigned depth, Advance advance) {
  if (depth < 1 || depth > 4096)
    throw std::invalid_argument("depth must be between 1 and 4096, got " + std::to_string(depth));
  return std::make_unique<UringBackend>(depth, std::move(advance));
}

}  // namespace lohan
