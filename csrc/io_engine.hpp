// Files, tickets and waiting, common to all native engines. This code does not depend on Python.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "io_backend.hpp"
#include "io_error.hpp"

namespace lohan {

constexpr uint64_t kIoAlign = 4096;

std::chrono::steady_clock::time_point deadline_after(double seconds);

class IoEngine {
 public:
  using Clock = std::chrono::steady_clock;
  using MakeBackend = std::function<std::unique_ptr<Backend>(Advance)>;

  IoEngine(const MakeBackend& make_backend, uint64_t piece_bytes);
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  int open(const std::string& path, uint64_t size, bool create);
  uint64_t submit(bool write, int file, uint64_t offset, void* data, uint64_t length);

  // Return true when the ticket is complete, or false at `until`. A complete ticket is then removed
  // by finish(), which throws if the I/O failed.
  bool wait_until(uint64_t ticket, Clock::time_point until);
  void finish(uint64_t ticket);
  IoError late(uint64_t ticket, double timeout_s);

  void sync(int file);

  // Wait for all I/O in flight, close the files, and throw if a ticket that nobody waited for has
  // failed. If the deadline passes first, throw and change nothing, because the kernel may still be
  // writing to the buffers.
  void close(double timeout_s);
  bool closed() const { return closed_; }
  bool forked() const;  // true in a child process, which does not have the engine's threads
  bool direct();  // whether every file so far was opened with O_DIRECT

 private:
  struct File {
    int fd;
    std::string path;
    uint64_t size;
    bool direct;
  };

  bool advance(Piece& piece, int64_t result);
  File file_at(int file);  // a copy, because the table may grow in the meantime
  void check_usable() const;
  IoError failure(const Ticket& ticket) const;

  const uint64_t piece_bytes_;
  const pid_t pid_;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::condition_variable completed_;
  std::vector<File> files_;
  std::unordered_map<uint64_t, std::shared_ptr<Ticket>> tickets_;
  uint64_t next_ticket_ = 1;
  std::unique_ptr<Backend> backend_;
};

}  // namespace lohan
