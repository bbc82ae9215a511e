#include "isa.hpp"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lohan {
namespace {

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{supported_isas().back()};
  return value;
}

}  // namespace

std::vector<Isa> supported_isas() {
  std::vector<Isa> found{Isa::plain};
  // The tables are empty where the compiler does not target that instruction set.
  if (kernels_avx2.update && has_avx2()) found.push_back(Isa::avx2);
  if (kernels_avx512.update && has_avx512()) found.push_back(Isa::avx512);
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
  std::string known;
  for (Isa candidate : supported_isas()) {
    if (name == isa_name(candidate)) {
      chosen() = candidate;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(isa_name(candidate));
  }
  throw std::invalid_argument("isa '" + name + "' is not supported here; choose one of: " + known);
}

const Kernels& kernels() {
  switch (isa()) {
    case Isa::avx2: return kernels_avx2;
    case Isa::avx512: return kernels_avx512;
    default: return kernels_plain;
  }
}

bool has_sse42() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  return false;
#endif
}

}  // namespace lohan
