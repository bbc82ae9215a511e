// Pages of the host that a copy in flight uses: the host must not write to the source of a copy, nor
// touch its destination, before the copy has run. With the guard on it cannot: a thread that tries
// faults with its own stack, and a drive gets an error. Pages that a copy uses in part are left alone.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace softcuda {

class PageGuard {
 public:
  explicit PageGuard(bool enabled) : enabled_(enabled) {}
  void enable(bool enabled) { enabled_ = enabled; }
  bool enabled() const { return enabled_; }

  void protect(const void* address, size_t size, bool is_destination) {
    std::lock_guard lock(mutex_);
    each_page(address, size, [&](uintptr_t page) {
      auto& uses = pages_[page];
      ++(is_destination ? uses.written : uses.read);
      set_rights(page, uses);
    });
  }

  // Makes the pages of one copy usable, runs it, and restores what other copies need.
  template <typename Copy>
  void run(const void* address, size_t size, bool is_destination, Copy copy) {
    std::lock_guard lock(mutex_);
    each_page(address, size, [&](uintptr_t page) {
      mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE);
    });
    copy();
    each_page(address, size, [&](uintptr_t page) {
      auto& uses = pages_[page];
      --(is_destination ? uses.written : uses.read);
      set_rights(page, uses);
      if (uses.written == 0 && uses.read == 0) pages_.erase(page);
    });
  }

 private:
  static constexpr uintptr_t kPage = 4096;
  struct Uses {
    int written = 0, read = 0;
  };

  template <typename Use>
  static void each_page(const void* address, size_t size, Use use) {
    const auto start = uintptr_t(address), end = start + size;
    for (uintptr_t page = (start + kPage - 1) / kPage * kPage; page + kPage <= end; page += kPage) {
      use(page);
    }
  }
  static void set_rights(uintptr_t page, const Uses& uses) {
    const int rights = uses.written > 0 ? PROT_NONE
                       : uses.read > 0  ? PROT_READ
                                        : PROT_READ | PROT_WRITE;
    mprotect(reinterpret_cast<void*>(page), kPage, rights);
  }

  std::atomic<bool> enabled_;
  std::mutex mutex_;
  std::map<uintptr_t, Uses> pages_;
};

}  // namespace softcuda
