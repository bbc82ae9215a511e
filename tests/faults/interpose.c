/* Calls on files that fail, fall short or are late: loaded ahead of the C library (LD_PRELOAD).
 *
 * Nothing happens before lohan_faults_arm. Then calls with the given name on files under a folder
 * are counted, in a file that outlives the process, and the `at`-th (from 1), or every one from it
 * on, has the given fate: an errno, half of its bytes, or a delay. io_uring_enter has no path: all
 * count. It can fail, but what a ring completes is the kernel's own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, DELAY = -2 };

struct tally {
  atomic_long seen, fired;
};

static struct tally *tally;
static char call[32], prefix[4096];
static long at, every;
static int fate; /* an errno, SHORT or DELAY */

int lohan_faults_arm(const char *name, long first, int on, int kind, const char *under,
                     const char *file) {
  int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof *tally) != 0) return -1;
  void *place = mmap(NULL, sizeof *tally, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (place == MAP_FAILED) return -1;
  snprintf(call, sizeof call, "%s", name);
  snprintf(prefix, sizeof prefix, "%s", under);
  at = first, every = on, fate = kind;
  tally = place;
  return 0;
}

static int under_prefix(const char *path) { return strncmp(path, prefix, strlen(prefix)) == 0; }

static int fd_under_prefix(int fd) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return under_prefix(path);
}

/* What becomes of this call: 0, an errno, or SHORT. */
static int counted(void) {
  const long number = atomic_fetch_add(&tally->seen, 1) + 1;
  if (number < at || (number > at && !every)) return 0;
  atomic_fetch_add(&tally->fired, 1);
  if (fate == DELAY) usleep(200000);
  return fate == DELAY ? 0 : fate;
}

static int named(const char *name) { return tally != NULL && strcmp(call, name) == 0; }

static int of_fd(const char *name, int fd) {
  return named(name) && fd_under_prefix(fd) ? counted() : 0;
}

static int of_paths(const char *name, const char *from, const char *to) {
  return named(name) && (under_prefix(from) || under_prefix(to)) ? counted() : 0;
}

/* Files opened with O_DIRECT go on at whole blocks. */
static size_t half(size_t bytes) {
  const size_t blocks = bytes / 2 / 4096 * 4096;
  return blocks ? blocks : bytes;
}

#define REAL(result, name, ...)                             \
  static result (*real)(__VA_ARGS__);                       \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define FAIL(error)    \
  do {                 \
    if ((error) > 0) { \
      errno = (error); \
      return -1;       \
    }                  \
  } while (0)

#define TRANSFER(name, text, pointer)                                    \
  ssize_t name(int fd, pointer data, size_t bytes, off_t offset) {       \
    REAL(ssize_t, #name, int, pointer, size_t, off_t);                   \
    const int error = of_fd(text, fd);                                   \
    FAIL(error);                                                         \
    return real(fd, data, error == SHORT ? half(bytes) : bytes, offset); \
  }
TRANSFER(pread, "pread", void *)
TRANSFER(pread64, "pread", void *)
TRANSFER(pwrite, "pwrite", const void *)
TRANSFER(pwrite64, "pwrite", const void *)

#define VECTOR(name)                                                           \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) {   \
    REAL(ssize_t, #name, int, const struct iovec *, int, off_t);               \
    const int error = of_fd("pwritev", fd);                                    \
    FAIL(error);                                                               \
    return real(fd, parts, error == SHORT && count > 1 ? count / 2 : count, offset); \
  }
VECTOR(pwritev)
VECTOR(pwritev64)

ssize_t write(int fd, const void *data, size_t bytes) {
  REAL(ssize_t, "write", int, const void *, size_t);
  const int error = of_fd("write", fd);
  FAIL(error);
  return real(fd, data, error == SHORT && bytes > 1 ? bytes / 2 : bytes);
}

#define SYNC(name)                       \
  int name(int fd) {                     \
    REAL(int, #name, int);               \
    const int error = of_fd(#name, fd);  \
    FAIL(error);                         \
    return real(fd);                     \
  }
SYNC(fsync)
SYNC(fdatasync)

#define ALLOCATE(name)                                   \
  int name(int fd, int mode, off_t offset, off_t bytes) { \
    REAL(int, #name, int, int, off_t, off_t);            \
    const int error = of_fd("fallocate", fd);            \
    FAIL(error);                                         \
    return real(fd, mode, offset, bytes);                \
  }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  const int error = of_paths("rename", from, to);
  FAIL(error);
  return real(from, to);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  const int error = of_paths("renameat2", from, to);
  FAIL(error);
  return real(from_dir, from, to_dir, to, flags);
}

long syscall(long number, ...) {
  REAL(long, "syscall", long, ...);
  long given[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) given[i] = va_arg(list, long);
  va_end(list);
  if (number == __NR_io_uring_enter && named("io_uring_enter")) {
    const int error = counted();
    FAIL(error);
  }
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
