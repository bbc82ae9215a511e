#include "io_file.hpp"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "io_error.hpp"

namespace lohan {
namespace {

int open_retrying(const std::string& path, int flags) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// Returns a file descriptor, or -errno on failure.
OpenedFile open_direct(const std::string& path, int flags) {
  int fd = open_retrying(path, flags | O_DIRECT);
  if (fd >= 0) return {fd, true};
  if (errno == EINVAL) fd = open_retrying(path, flags);
  return {fd >= 0 ? fd : -errno, false};
}

int free_bytes(int fd, uint64_t& bytes) {
  struct statvfs fs;
  if (fstatvfs(fd, &fs) != 0) return errno;
  bytes = static_cast<uint64_t>(fs.f_bavail) * fs.f_frsize;
  return 0;
}

// This is checked before allocating, because fallocate would fill the file system before it fails.
int check_space(int fd, uint64_t size) {
  struct stat info;
  if (fstat(fd, &info) != 0) return errno;
  const uint64_t allocated = static_cast<uint64_t>(info.st_blocks) * 512;
  uint64_t free = 0;
  if (const int error = free_bytes(fd, free)) return error;
  return size > allocated && size - allocated > free ? ENOSPC : 0;
}

// Returns 0 or an errno.
int allocate(int fd, const std::string& path, uint64_t size) {
  if (const int error = check_space(fd, size)) return error;
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) return errno;
  if (size == 0) return 0;
  int result;
  do {
    result = fallocate(fd, 0, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  if (errno != EOPNOTSUPP) return errno;
  // posix_fallocate may write single bytes, which a descriptor for direct I/O would refuse.
  const int plain = open_retrying(path, O_RDWR);
  if (plain < 0) return errno;
  do {
    result = posix_fallocate(plain, 0, static_cast<off_t>(size));
  } while (result == EINTR);
  if (::close(plain) != 0 && result == 0) result = errno;
  return result;
}

}  // namespace

OpenedFile open_file(const std::string& path, uint64_t size) {
  const OpenedFile opened = open_direct(path, O_RDWR);
  if (opened.fd < 0) throw file_error("opening", path, -opened.fd);
  struct stat info;
  if (fstat(opened.fd, &info) != 0) {
    const int error = errno;
    ::close(opened.fd);
    throw file_error("fstat of", path, error);
  }
  if (static_cast<uint64_t>(info.st_size) != size) {
    ::close(opened.fd);
    throw IoError("opening " + path + " failed: expected " + std::to_string(size) +
                  " bytes, found " + std::to_string(info.st_size) +
                  "; the file was truncated or belongs to another store");
  }
  return opened;
}

OpenedFile create_file(const std::string& path, uint64_t size) {
  OpenedFile opened = open_direct(path, O_RDWR | O_CREAT | O_EXCL);
  const bool is_new = opened.fd >= 0;
  if (opened.fd == -EEXIST) opened = open_direct(path, O_RDWR);
  if (opened.fd < 0) throw file_error("creating", path, -opened.fd);
  const int error = allocate(opened.fd, path, size);
  if (error == 0) return opened;
  uint64_t free = 0;
  const bool known = free_bytes(opened.fd, free) == 0;
  ::close(opened.fd);
  if (is_new) unlink(path.c_str());
  throw IoError("allocating " + std::to_string(size) + " bytes for " + path + " failed: " +
                errno_text(error) + ", " + (known ? std::to_string(free) : "unknown") +
                " bytes free; " + next_move(error));
}

}  // namespace lohan
