// NCCL of software CUDA: ranks are processes of one machine and meet in shared memory. Sums are
// taken in the order of the ranks. What is not needed here is refused by the generated names.
#include "runtime.hpp"

#include <cuda_runtime_api.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

namespace {

constexpr size_t kSlot = size_t{1} << 20;
enum Result { kSuccess = 0, kCuda = 1, kSystem = 2, kInvalid = 4, kRemote = 6 };

struct Id {
  char name[128];
};

struct Meeting {
  std::atomic<int> joined, arrived, round, aborted;
};

struct Communicator {
  int world, rank;
  Meeting* meeting;
  char* slots;
  char name[128];

  bool failed() const { return meeting->aborted != 0; }
  bool meet() const {  // false: somebody gave up
    const int round = meeting->round;
    if (meeting->arrived.fetch_add(1) + 1 == world) {
      meeting->arrived = 0;
      ++meeting->round;
    }
    while (meeting->round == round && !failed()) usleep(20);
    return !failed();
  }
  char* slot(int of) const { return slots + of * kSlot; }
};

size_t width(int type) {
  constexpr size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? widths[type] : 0;
}

template <typename T>
void add(char* into, const char* from, size_t count) {
  auto* sums = reinterpret_cast<T*>(into);
  auto* more = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) sums[i] = T(sums[i] + more[i]);
}

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float made;
    std::memcpy(&made, &wide, 4);
    return made;
  }
  explicit BFloat16(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    bits = uint16_t((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
  }
};

void add(int type, char* into, const char* from, size_t count) {
  switch (type) {
    case 0: return add<int8_t>(into, from, count);
    case 1: return add<uint8_t>(into, from, count);
    case 2: return add<int32_t>(into, from, count);
    case 4: return add<int64_t>(into, from, count);
    case 7: return add<float>(into, from, count);
    case 8: return add<double>(into, from, count);
    case 9: return add<BFloat16>(into, from, count);
    default: std::fprintf(stderr, "software CUDA: no sums of NCCL type %d\n", type); std::abort();
  }
}

// In the stream's order. `reads` and `writes`: bytes at those addresses.
int enqueue(void* stream, const char* name, softcuda::Range reads, softcuda::Range writes,
            std::function<void()> work) {
  const softcuda::Range ranges[] = {reads, writes};
  softcuda_access(stream, ranges, 2, name);
  const auto run = [](void* data) {
    std::unique_ptr<std::function<void()>>(static_cast<std::function<void()>*>(data))->operator()();
  };
  softcuda_push(stream, run, new std::function<void()>(std::move(work)));
  return kSuccess;
}

// Every rank shows a piece after the other; `take` sees each with its place and length in bytes.
template <typename Take>
void exchange(const Communicator& with, const char* own, size_t size, Take take) {
  for (size_t at = 0; at < size; at += kSlot) {
    const size_t count = std::min(kSlot, size - at);
    std::memcpy(with.slot(with.rank), own + at, count);
    if (!with.meet()) return;
    take(at, count);
    if (!with.meet()) return;
  }
}

char* here(const void* address) { return static_cast<char*>(softcuda_host_view(address)); }

}  // namespace

API int ncclGetVersion(int* version) {
  *version = 22703;
  return kSuccess;
}
API const char* ncclGetErrorString(int result) {
  if (result == kCuda) return "unhandled cuda error: Failed to CUDA calloc, out of memory";
  return result == kSuccess ? "no error" : "software NCCL error";
}
API const char* ncclGetLastError(Communicator*) { return ""; }
API int ncclGetUniqueId(Id* id) {
  std::random_device chance;
  std::snprintf(id->name, sizeof id->name, "/lohan-nccl-%d-%08x%08x", getpid(), chance(), chance());
  return kSuccess;
}
API int ncclCommInitRank(Communicator** made, int world, Id id, int rank) {
  const char* mib = std::getenv("SOFTCUDA_NCCL_MIB");  // that a communicator takes of the device
  int device = 0;
  cudaGetDevice(&device);
  if (mib != nullptr && !softcuda_charge(device, std::strtoull(mib, nullptr, 10) << 20)) return kCuda;
  const size_t size = 4096 + world * kSlot;
  const int file = shm_open(id.name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, off_t(size)) != 0) return kSystem;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystem;
  auto* own = new Communicator{world, rank, static_cast<Meeting*>(memory),
                               static_cast<char*>(memory) + 4096, {}};
  std::memcpy(own->name, id.name, sizeof own->name);
  ++own->meeting->joined;
  while (own->meeting->joined < world) usleep(100);
  if (rank == 0) shm_unlink(id.name);
  *made = own;
  return kSuccess;
}
API int ncclCommInitRankConfig(Communicator** made, int world, Id id, int rank, void*) {
  return ncclCommInitRank(made, world, id, rank);
}
API int ncclCommFinalize(Communicator*) { return kSuccess; }
API int ncclCommDestroy(Communicator*) { return kSuccess; }
API int ncclCommAbort(Communicator* own) {
  own->meeting->aborted = 1;
  return kSuccess;
}
API int ncclCommGetAsyncError(Communicator* own, int* result) {
  *result = own->failed() ? kRemote : kSuccess;
  return kSuccess;
}
API int ncclCommCount(const Communicator* own, int* count) {
  *count = own->world;
  return kSuccess;
}
API int ncclCommUserRank(const Communicator* own, int* rank) {
  *rank = own->rank;
  return kSuccess;
}
API int ncclGroupStart() { return kSuccess; }
API int ncclGroupEnd() { return kSuccess; }
API int ncclAllGather(const void* piece, void* whole, size_t count, int type, Communicator* with,
                      void* stream) {
  const size_t size = count * width(type);
  const softcuda::Range reads{piece, size, false}, writes{whole, size * with->world, true};
  return enqueue(stream, "an all-gather", reads, writes, [=, own = here(piece), all = here(whole)] {
    exchange(*with, own, size, [&](size_t at, size_t length) {
      for (int rank = 0; rank < with->world; ++rank) {
        std::memmove(all + rank * size + at, with->slot(rank), length);
      }
    });
  });
}
API int ncclAllReduce(const void* from, void* into, size_t count, int type, int op,
                      Communicator* with, void* stream) {
  if (op != 0) return kInvalid;
  const size_t size = count * width(type);
  const softcuda::Range reads{from, size, false}, writes{into, size, true};
  return enqueue(stream, "an all-reduce", reads, writes, [=, own = here(from), all = here(into)] {
    exchange(*with, own, size, [&](size_t at, size_t length) {
      std::memcpy(all + at, with->slot(0), length);
      for (int rank = 1; rank < with->world; ++rank) {
        add(type, all + at, with->slot(rank), length / width(type));
      }
    });
  });
}
API int ncclReduceScatter(const void* rows, void* row, size_t count, int type, int op,
                          Communicator* with, void* stream) {
  if (op != 0) return kInvalid;
  const size_t size = count * width(type);
  const softcuda::Range reads{rows, size * with->world, false}, writes{row, size, true};
  return enqueue(stream, "a reduce-scatter", reads, writes, [=, own = here(rows), sum = here(row)] {
    exchange(*with, own, size * with->world, [&](size_t at, size_t length) {
      const size_t first = std::max(at, with->rank * size);
      const size_t last = std::min(at + length, (with->rank + 1) * size);
      if (first >= last) return;
      char* into = sum + first - with->rank * size;
      std::memcpy(into, with->slot(0) + first - at, last - first);
      for (int rank = 1; rank < with->world; ++rank) {
        add(type, into, with->slot(rank) + first - at, (last - first) / width(type));
      }
    });
  });
}
API int ncclBroadcast(const void* from, void* into, size_t count, int type, int root,
                      Communicator* with, void* stream) {
  const size_t size = count * width(type);
  const softcuda::Range reads{from, size, false}, writes{into, size, true};
  return enqueue(stream, "a broadcast", reads, writes, [=, own = here(from), all = here(into)] {
    exchange(*with, own, size, [&](size_t at, size_t length) {
      std::memcpy(all + at, with->slot(root), length);
    });
  });
}
