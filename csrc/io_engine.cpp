#include "io_engine.hpp"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "io_file.hpp"

namespace lohan {
namespace {

constexpr int kMaxRetries = 1000;

std::string range_text(const char* verb, const std::string& path, uint64_t offset,
                       uint64_t length) {
  return std::string(verb) + " of " + std::to_string(length) + " bytes at offset " +
         std::to_string(offset) + " of " + path;
}

std::string range_text(const Ticket& t) {
  return range_text(t.write ? "write" : "read", t.path, t.offset, t.length);
}

void check_aligned(const char* name, uint64_t value) {
  if (value % kIoAlign != 0)
    throw std::invalid_argument(std::string(name) + " " + std::to_string(value) +
                                " is not a multiple of " + std::to_string(kIoAlign));
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

IoEngine::IoEngine(const MakeBackend& make_backend, uint64_t piece_bytes)
    : piece_bytes_(piece_bytes), pid_(getpid()) {
  check_aligned("piece_bytes", piece_bytes);
  if (piece_bytes == 0 || piece_bytes > (1u << 30))
    throw std::invalid_argument("piece_bytes must be between 4096 and 1073741824, got " +
                                std::to_string(piece_bytes));
  backend_ = make_backend([this](Piece& piece, int64_t result) { return advance(piece, result); });
}

IoEngine::~IoEngine() {
  if (forked()) {
    backend_.release();  // its threads exist in the parent only
    for (const File& f : files_) ::close(f.fd);
  }
}

bool IoEngine::forked() const { return getpid() != pid_; }

void IoEngine::check_usable() const {
  if (closed_) throw IoError("the I/O engine is closed; open a new one");
  if (forked())
    throw IoError("the I/O engine was opened in process " + std::to_string(pid_) +
                  " and does not work in its child " + std::to_string(getpid()) +
                  "; open a new one after fork");
}

int IoEngine::open(const std::string& path, uint64_t size, bool create) {
  check_usable();
  OpenedFile opened = create ? create_file(path, size) : open_file(path, size);
  std::lock_guard lock(mutex_);
  files_.push_back({opened.fd, path, size, opened.direct});
  return static_cast<int>(files_.size()) - 1;
}

bool IoEngine::direct() {
  std::lock_guard lock(mutex_);
  return std::all_of(files_.begin(), files_.end(), [](const File& f) { return f.direct; });
}

IoEngine::File IoEngine::file_at(int file) {
  std::lock_guard lock(mutex_);
  if (file < 0 || static_cast<size_t>(file) >= files_.size())
    throw std::invalid_argument("file " + std::to_string(file) + " is not open; " +
                                std::to_string(files_.size()) + " files are");
  return files_[static_cast<size_t>(file)];
}

uint64_t IoEngine::submit(bool write, int file, uint64_t offset, void* data, uint64_t length) {
  check_usable();
  const File f = file_at(file);
  check_aligned("offset", offset);
  check_aligned("buffer length", length);
  check_aligned("buffer address", length == 0 ? 0 : reinterpret_cast<uintptr_t>(data));
  if (offset > f.size || length > f.size - offset)
    throw std::invalid_argument(range_text(write ? "write" : "read", f.path, offset, length) +
                                " ends after the file's " + std::to_string(f.size) + " bytes");
  auto ticket = std::make_shared<Ticket>();
  ticket->write = write;
  ticket->path = f.path;
  ticket->offset = offset;
  ticket->length = length;
  std::vector<Piece> pieces;
  for (uint64_t at = 0; at < length; at += piece_bytes_)
    pieces.push_back({ticket, f.fd, static_cast<char*>(data) + at, offset + at,
                      std::min(piece_bytes_, length - at)});
  ticket->pieces_left = pieces.size();
  uint64_t id;
  {
    std::lock_guard lock(mutex_);
    check_usable();  // Check again: from here on, close() waits for this ticket.
    id = next_ticket_++;
    tickets_.emplace(id, ticket);
  }
  if (!pieces.empty()) backend_->submit(std::move(pieces));
  return id;
}

// Called by the backend's threads. A ticket is complete when none of its pieces is in flight, even
// after a failure, because the kernel may use the buffer until then.
bool IoEngine::advance(Piece& piece, int64_t result) {
  int error = 0;
  bool came_short = false;
  if (result == -EINTR || result == -EAGAIN) {
    if (++piece.retries <= kMaxRetries) return true;
    error = EAGAIN;
  } else if (result < 0) {
    error = static_cast<int>(-result);
  } else {
    const uint64_t reached = piece.done + static_cast<uint64_t>(result);
    // Direct I/O continues at an aligned offset. A partial block at the end of a file is read again
    // from there and then makes no progress.
    const uint64_t whole = reached / kIoAlign * kIoAlign;
    if (reached < piece.length && whole > piece.done) {
      piece.done = whole;
      return true;
    }
    came_short = reached < piece.length;
    piece.done = reached;
  }
  std::lock_guard lock(mutex_);
  Ticket& ticket = *piece.ticket;
  const uint64_t got = piece.offset - ticket.offset + piece.done;
  if ((error != 0 || came_short) && error != ECANCELED && got < ticket.failed_at) {
    ticket.error = error;
    ticket.came_short = came_short;
    ticket.failed_at = got;
  }
  if (--ticket.pieces_left == 0) completed_.notify_all();
  return false;
}

bool IoEngine::wait_until(uint64_t id, Clock::time_point until) {
  std::unique_lock lock(mutex_);
  auto found = tickets_.find(id);
  if (found == tickets_.end()) {
    if (closed_) throw IoError("the I/O engine is closed; open a new one");
    throw std::invalid_argument("ticket " + std::to_string(id) +
                                " is unknown or was waited for before");
  }
  auto ticket = found->second;
  return completed_.wait_until(lock, until, [&] { return ticket->pieces_left == 0; });
}

IoError IoEngine::failure(const Ticket& t) const {
  if (t.came_short)
    return IoError(range_text(t) + " came back short: expected " + std::to_string(t.length) +
                   ", got " + std::to_string(t.failed_at) +
                   (t.write ? "; " + next_move(ENOSPC)
                            : "; the file was truncated, restore it or resume from another copy"));
  return IoError(range_text(t) + " failed after " + std::to_string(t.failed_at) +
                 " bytes: " + errno_text(t.error) + "; " + next_move(t.error));
}

void IoEngine::finish(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto found = tickets_.find(id);
  if (found == tickets_.end()) return;
  auto ticket = found->second;
  tickets_.erase(found);
  if (ticket->failed()) throw failure(*ticket);
}

IoError IoEngine::late(uint64_t id, double timeout_s) {
  std::lock_guard lock(mutex_);
  auto found = tickets_.find(id);
  std::string what = found == tickets_.end() ? "I/O" : range_text(*found->second);
  return IoError(what + " missed its deadline of " + seconds_text(timeout_s) +
                 "; check the drive (dmesg, iostat) or raise the I/O timeout");
}

void IoEngine::sync(int file) {
  check_usable();
  const File f = file_at(file);
  int result;
  do {
    result = fdatasync(f.fd);
  } while (result != 0 && errno == EINTR);
  if (result != 0) throw file_error("fdatasync of", f.path, errno);
}

void IoEngine::close(double timeout_s) {
  if (closed_ || forked()) return;
  const auto until = deadline_after(timeout_s);
  std::unique_lock lock(mutex_);
  auto under_way = [](const auto& entry) { return entry.second->pieces_left > 0; };
  auto idle = [&] { return std::none_of(tickets_.begin(), tickets_.end(), under_way); };
  if (!completed_.wait_until(lock, until, idle)) {
    auto stuck = std::find_if(tickets_.begin(), tickets_.end(), under_way);
    throw IoError("closing: " + range_text(*stuck->second) + " not complete after " +
                  seconds_text(timeout_s) + "; check the drive (dmesg, iostat)");
  }
  if (closed_.exchange(true)) return;
  lock.unlock();  // The backend's threads may still be returning from advance().
  backend_->stop();
  lock.lock();
  std::string problem;
  for (const auto& [id, ticket] : tickets_)
    if (ticket->failed() && problem.empty()) problem = failure(*ticket).what();
  tickets_.clear();
  for (const File& f : files_)
    if (::close(f.fd) != 0 && errno != EINTR && problem.empty())
      problem = file_error("close of", f.path, errno).what();
  files_.clear();
  if (!problem.empty()) throw IoError(problem);
}

IoEngine::Clock::time_point deadline_after(double seconds) {
  constexpr double kYear = 365.0 * 86400;  // The limit of a wait without a deadline.
  const double bounded = seconds > 0 ? std::min(seconds, kYear) : 0.0;
  return IoEngine::Clock::now() +
         std::chrono::duration_cast<IoEngine::Clock::duration>(
             std::chrono::duration<double>(bounded));
}

}  // namespace lohan
