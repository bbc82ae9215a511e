#include "isa.hpp"

#include <atomic>
#include <cstdint>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lohan {
namespace {

// Detection of features that the processor has and the operating system saves. The compiler's
// builtin is not used, because not every compiler that builds wheels can link its runtime library
// into a shared library.
struct Processor {
  bool sse42 = false, avx2 = false, avx512 = false;

  Processor() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    sse42 = c & bit_SSE4_2;
    const bool f16c = c & bit_F16C;
    if (!(c & bit_OSXSAVE) || !(c & bit_AVX) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const uint64_t saved = saved_registers();
    constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
    constexpr unsigned kWide = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    avx2 = f16c && (b & bit_AVX2) && (saved & kYmm) == kYmm;
    avx512 = avx2 && (b & kWide) == kWide && (saved & kZmm) == kZmm;
#endif
  }

#if defined(__x86_64__)
 private:
  static uint64_t saved_registers() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
  }
#endif
};

const Processor& processor() {
  static const Processor found;
  return found;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{supported_isas().back()};
  return value;
}

}  // namespace

std::vector<Isa> supported_isas() {
  std::vector<Isa> found{Isa::plain};
  // The tables are empty if the compiler does not target that instruction set.
  if (kernels_avx2.update && processor().avx2) found.push_back(Isa::avx2);
  if (kernels_avx512.update && processor().avx512) found.push_back(Isa::avx512);
  return found;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    default: return "plain";
  }
}

Isa isa() { return chosen(); }

void set_isa(const std::string& name) {
  std::string names;
  for (Isa candidate : supported_isas()) {
    if (name == isa_name(candidate)) {
      chosen() = candidate;
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(isa_name(candidate));
  }
  throw std::invalid_argument("isa '" + name + "' is not supported here; choose one of: " + names);
}

const Kernels& kernels() {
  switch (isa()) {
    case Isa::avx2: return kernels_avx2;
    case Isa::avx512: return kernels_avx512;
    default: return kernels_plain;
  }
}

bool has_sse42() { return processor().sse42; }

}  // namespace lohan
