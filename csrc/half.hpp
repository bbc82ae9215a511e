// Scalar bf16 and fp16 conversions on bit patterns, bit-equal to the vector instructions.
#pragma once

#include <stdint.h>
#include <string.h>

namespace lohan {
namespace {  // local to each file: see CMakeLists.txt

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

constexpr uint32_t kQuietNan = 0x7fc00000u;

// The fp32 bits are (w << 16) + r with a signed r, so w is the nearest bf16. The remainder r = bits
// - (w << 16) lies in [-32768, 32767] and equals the low half of the bits. Ties round away from
// zero: with ties to even, 65,537 patterns would share an even w, one more than r can distinguish.
// NaN becomes the quiet NaN, because rounding its payload could leave infinity or zero in w.
inline void split_bf16(float x, uint16_t& w, int16_t& r) {
  uint32_t u = x != x ? kQuietNan : bits_of(x);
  w = static_cast<uint16_t>((u + 0x8000u) >> 16);
  r = static_cast<int16_t>(static_cast<uint16_t>(u));
}

inline float join_bf16(uint16_t w, int16_t r) {
  return float_of((static_cast<uint32_t>(w) << 16) +
                  static_cast<uint32_t>(static_cast<int32_t>(r)));
}

inline float bf16_to_float(uint16_t w) { return float_of(static_cast<uint32_t>(w) << 16); }

// Round to nearest, ties to even. Values from 65520 on become infinity; NaN keeps its upper payload
// and becomes quiet.
inline uint16_t float_to_fp16(float x) {
  uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a >= 0x38800000u) {
    a += 0xfffu + ((a >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((a - 0x38000000u) >> 13));
  }
  if (a <= 0x33000000u) return static_cast<uint16_t>(sign);
  uint32_t shift = 126u - (a >> 23), mantissa = (a & 0x7fffffu) | 0x800000u;
  uint32_t half = mantissa >> shift, rest = mantissa & ((1u << shift) - 1u);
  uint32_t tie = 1u << (shift - 1u);
  if (rest > tie || (rest == tie && (half & 1u))) ++half;
  return static_cast<uint16_t>(sign | half);
}

inline float fp16_to_float(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 31)
    return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent == 0)
    return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

}  // namespace
}  // namespace lohan
