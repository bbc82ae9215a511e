#include "io_error.hpp"

#include <errno.h>
#include <string.h>

namespace lohan {
namespace {

const char* errno_name(int error) {
  switch (error) {
    case EPERM: return "EPERM";
    case ENOENT: return "ENOENT";
    case EIO: return "EIO";
    case EBADF: return "EBADF";
    case EAGAIN: return "EAGAIN";
    case ENOMEM: return "ENOMEM";
    case EACCES: return "EACCES";
    case EFAULT: return "EFAULT";
    case EBUSY: return "EBUSY";
    case EEXIST: return "EEXIST";
    case ENODEV: return "ENODEV";
    case ENOTDIR: return "ENOTDIR";
    case EISDIR: return "EISDIR";
    case EINVAL: return "EINVAL";
    case ENFILE: return "ENFILE";
    case EMFILE: return "EMFILE";
    case EFBIG: return "EFBIG";
    case ENOSPC: return "ENOSPC";
    case EROFS: return "EROFS";
    case ENOSYS: return "ENOSYS";
    case EOPNOTSUPP: return "EOPNOTSUPP";
    case ECANCELED: return "ECANCELED";
    case EDQUOT: return "EDQUOT";
    case ETIMEDOUT: return "ETIMEDOUT";
    case EREMOTEIO: return "EREMOTEIO";
    default: return "errno";
  }
}

}  // namespace

std::string errno_text(int error) {
  char text[128];
  // The GNU form returns the message, and the POSIX form fills the buffer. Accept both.
  auto message = strerror_r(error, text, sizeof text);
  std::string name = errno_name(error);
  if (name == "errno") name += " " + std::to_string(error);
  if constexpr (std::is_same_v<decltype(message), char*>) {
    return name + " (" + message + ")";
  } else {
    return name + " (" + text + ")";
  }
}

std::string next_move(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return "free space on that file system or add a directory on another drive";
    case EACCES:
    case EPERM:
    case EROFS: return "check the owner, the permissions and the mount options of the path";
    case ENOENT:
    case ENOTDIR: return "check the path; the folder must exist";
    case EFBIG: return "raise the file size limit (ulimit -f) or use another file system";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    case ENOMEM: return "lower the host budget or raise the locked memory limit (ulimit -l)";
    case EIO:
    case ENODEV:
    case EREMOTEIO: return "check the drive (dmesg, smartctl), then resume from the last step";
    default: return "check the path and the drive, then resume from the last step";
  }
}

IoError file_error(const std::string& what, const std::string& path, int error) {
  return IoError(what + " " + path + " failed: " + errno_text(error) + "; " + next_move(error));
}

}  // namespace lohan
