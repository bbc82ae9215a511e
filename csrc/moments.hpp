// Moments in 16 and 8 bits.
//
// Both round up or down at random, with probabilities given by the distance to either neighbour.
// Rounding to nearest would never change a second moment, because a step adds less than half a
// unit. The random numbers are a hash of a seed and the index of the element, so they are the same
// on any thread and with any instruction set.
//
//   bf16  the upper half of the fp32 bits, after 16 random bits were added to the lower one
//   int8  with a sign:    code = sign(x) * round(sqrt(|x|) / scale),  scale = largest root / 127
//         without one:    code = round(sqrt(sqrt(x)) / scale),        scale = largest root / 255
//         where the largest is over kScaled elements. Roots, since moments of neighbours differ by
//         orders of magnitude. A positive x without a sign is never 0: updates divide by its root.
//         If one of them is not finite, the scale is NaN, which marks all of them as unknown.
#pragma once

#include "half.hpp"
#include "update.hpp"

namespace lohan {
namespace {  // local to each file: see CMakeLists.txt

// It is odd, so that element indices are spread over all patterns.
constexpr uint32_t kStride = 0x9e3779b1u;

// Return 32 random bits for each element, starting with element i.
template <class V>
typename V::I chance(const UpdateArgs& a, size_t i) {
  const uint32_t base = (a.first + static_cast<uint32_t>(i)) * kStride + a.seed;
  auto x = V::iadd(V::iset(base), V::lanes(kStride));
  x = V::imul(V::ixor(x, V::template shift_right<16>(x)), V::iset(0x7feb352du));
  x = V::imul(V::ixor(x, V::template shift_right<15>(x)), V::iset(0x846ca68bu));
  return V::ixor(x, V::template shift_right<16>(x));
}

// Return the 16 of these bits that moment number k uses.
template <class V, int k>
typename V::I share(typename V::I bits) {
  if constexpr (k == 0) return V::iand(bits, V::iset(0xffffu));
  return V::template shift_right<16>(bits);
}

template <class V, bool has_sign>
typename V::F root(typename V::F x) {
  return V::sqrt(has_sign ? V::abs(x) : V::sqrt(x));
}

// Decode the moments of `vectors` vectors, starting with element i.
template <class V, bool has_sign>
void decode(const void* codes, float scale_of_block, size_t i, size_t vectors,
            typename V::F* x) {
  const auto scale = V::set(scale_of_block);
  for (size_t k = 0; k < vectors; ++k) {
    const size_t at = i + k * V::width;
    if constexpr (has_sign) {
      const auto t = V::mul(V::load_i8(static_cast<const int8_t*>(codes) + at), scale);
      x[k] = V::mul(t, V::abs(t));
    } else {
      const auto t = V::mul(V::load_u8(static_cast<const uint8_t*>(codes) + at), scale);
      x[k] = V::mul(V::mul(t, t), V::mul(t, t));
    }
  }
}

// Encode moments x, given their roots and the bits of the largest root; return the scale.
template <class V, int number, bool has_sign>
float encode(void* codes, size_t i, size_t vectors, const typename V::F* x, typename V::F* roots,
             uint32_t top, const typename V::I* bits) {
  constexpr uint32_t most = has_sign ? 127 : 255;
  const bool finite = top < 0x7f800000u;  // NaN is above infinity
  const float extent = float_of(top);
  const auto to_code = V::set(finite && top != 0 ? static_cast<float>(most) / extent : 0.0f);
  for (size_t k = 0; k < vectors; ++k) {
    const auto up = V::mul(V::to_float(share<V, number>(bits[k])), V::set(0x1p-16f));
    if (!finite) roots[k] = V::set(0.0f);
    const auto scaled = V::mul(roots[k], to_code);
    auto code = V::imin(V::truncated(V::add(scaled, up)), V::iset(most));
    if constexpr (has_sign) {
      const auto negative = V::sign_mask(x[k]);
      code = V::isub(V::ixor(code, negative), negative);
    } else {
      code = V::imax(code, V::imin(V::bits(roots[k]), V::iset(1)));
    }
    V::store8(static_cast<uint8_t*>(codes) + i + k * V::width, code);
  }
  return finite ? extent / static_cast<float>(most) : float_of(kQuietNan);
}

}  // namespace
}  // namespace lohan
