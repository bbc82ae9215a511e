// A few threads with pread and pwrite, which work on every file system and kernel.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "io_backend.hpp"
#include "thread_signals.hpp"

namespace lohan {
namespace {

class ThreadBackend : public Backend {
 public:
  ThreadBackend(unsigned count, Advance advance) : advance_(std::move(advance)) {
    BlockedSignals blocked;  // inherited by the threads
    for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }

  ~ThreadBackend() override { stop(); }

  void submit(std::vector<Piece> pieces) override {
    {
      std::lock_guard lock(mutex_);
      for (Piece& piece : pieces) queue_.push_back(std::move(piece));
    }
    ready_.notify_all();
  }

  void stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ready_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Piece piece = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      while (advance_(piece, transfer(piece))) {
      }
      piece.ticket.reset();
      lock.lock();
    }
  }

  static int64_t transfer(Piece& piece) {
    if (piece.pointless()) return -ECANCELED;
    if (piece.retries > 0) usleep(1000);
    char* data = piece.data + piece.done;
    const size_t bytes = piece.length - piece.done;
    const auto at = static_cast<off_t>(piece.offset + piece.done);
    const ssize_t result = piece.ticket->write ? pwrite(piece.fd, data, bytes, at)
                                               : pread(piece.fd, data, bytes, at);
    return result >= 0 ? result : -static_cast<int64_t>(errno);
  }

  Advance advance_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Piece> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_threads(unsigned count, Advance advance) {
  if (count < 1 || count > 256)
    throw std::invalid_argument("threads must be between 1 and 256, got " + std::to_string(count));
  return std::make_unique<ThreadBackend>(count, std::move(advance));
}

}  // namespace lohan
