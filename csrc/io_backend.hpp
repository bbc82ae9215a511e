// The interface between an engine and the backend that makes the system calls.
#pragma once

#include <stdint.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lohan {

// One requested read or write. The engine's mutex guards it, except for `failed_at`.
struct Ticket {
  bool write;
  std::string path;
  uint64_t offset;
  uint64_t length;
  size_t pieces_left;
  int error = 0;            // errno of the failed piece with the lowest offset
  bool came_short = false;  // end of file before the end of the piece
  // The bytes from `offset` up to which that piece succeeded; later pieces need not be started.
  std::atomic<uint64_t> failed_at{kNever};

  static constexpr uint64_t kNever = ~0ull;
  bool failed() const { return failed_at != kNever; }
};

// A part of a ticket small enough for one system call. `done` bytes of it are complete.
struct Piece {
  std::shared_ptr<Ticket> ticket;
  int fd;
  char* data;
  uint64_t offset;
  uint64_t length;
  uint64_t done = 0;
  int retries = 0;

  bool pointless() const { return offset + done - ticket->offset > ticket->failed_at; }
};

// Record the result of a system call (bytes or -errno); return whether to submit the rest of the
// piece again.
using Advance = std::function<bool(Piece&, int64_t result)>;

class Backend {
 public:
  virtual ~Backend() = default;
  // Queue the pieces and return. They are processed in this order, as far as the depth allows.
  virtual void submit(std::vector<Piece> pieces) = 0;
  // End the threads. Nothing may be in flight.
  virtual void stop() = 0;
};

std::unique_ptr<Backend> make_uring(unsigned depth, Advance advance);
std::unique_ptr<Backend> make_threads(unsigned count, Advance advance);

}  // namespace lohan
