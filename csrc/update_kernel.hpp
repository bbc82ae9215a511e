// The kernel bodies, generic over a vector type V; included by one file per instruction set.
#pragma once

#include "half.hpp"
#include "moments.hpp"
#include "rules.hpp"
#include "update.hpp"

namespace lohan {
namespace {  // local to each file: see CMakeLists.txt

constexpr size_t kLine = 16;  // fp32 numbers in a cache line

struct Plain {
  static constexpr size_t width = 1;
  using F = float;
  using I = uint32_t;
  static F set(float x) { return x; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  static F abs(F a) { return float_of(bits_of(a) & 0x7fffffffu); }
  // Return the non-negative x with the sign of s: 0 if s is 0, NaN if s is NaN.
  static F with_sign(F x, F s) { return s > 0 ? x : s < 0 ? -x : s == 0 ? 0.0f : s; }
  static F load_bf16(const uint16_t* p) { return bf16_to_float(*p); }
  static F load_fp16(const uint16_t* p) { return fp16_to_float(*p); }
  static void store_fp16(uint16_t* p, F x) { *p = float_to_fp16(x); }
  static F join(const uint16_t* w, const int16_t* r) { return join_bf16(*w, *r); }
  static void split(uint16_t* w, int16_t* r, F x) { split_bf16(x, *w, *r); }

  static I iset(uint32_t x) { return x; }
  static I lanes(uint32_t) { return 0; }
  static I iadd(I a, I b) { return a + b; }
  static I isub(I a, I b) { return a - b; }
  static I imul(I a, I b) { return a * b; }
  static I iand(I a, I b) { return a & b; }
  static I ixor(I a, I b) { return a ^ b; }
  static I imin(I a, I b) { return a < b ? a : b; }
  static I imax(I a, I b) { return a > b ? a : b; }
  template <int by>
  static I shift_right(I a) {
    return a >> by;
  }
  static uint32_t largest(I a) { return a; }
  static I bits(F a) { return bits_of(a); }
  static I sign_mask(F a) { return bits_of(a) >> 31 ? ~0u : 0u; }
  static F to_float(I a) { return static_cast<float>(static_cast<int32_t>(a)); }
  static I truncated(F a) { return static_cast<uint32_t>(static_cast<int32_t>(a)); }
  static F load_i8(const int8_t* p) { return static_cast<float>(*p); }
  static F load_u8(const uint8_t* p) { return static_cast<float>(*p); }
  static void store8(uint8_t* p, I code) { *p = static_cast<uint8_t>(code); }
  // Return the upper half of the bits after adding the 16-bit number `up`. NaN stays NaN.
  static void store_bf16(uint16_t* p, F x, I up) {
    *p = static_cast<uint16_t>(((x != x ? kQuietNan : bits_of(x)) + up) >> 16);
  }
};

template <class V, Master master>
typename V::F load_master(const UpdateArgs& a, size_t i) {
  if constexpr (master == Master::bf16_split) return V::join(a.w + i, a.r + i);
  return V::load(a.p + i);
}

template <class V, Master master>
void store_master(const UpdateArgs& a, size_t i, typename V::F p) {
  if constexpr (master == Master::bf16_split) V::split(a.w + i, a.r + i, p);
  if constexpr (master != Master::bf16_split) V::store(a.p + i, p);
  if constexpr (master == Master::fp16_copy) V::store_fp16(a.w + i, p);
}

template <class V, Grad grad>
typename V::F load_grad(const UpdateArgs& a, size_t i) {
  if constexpr (grad == Grad::bf16) return V::load_bf16(static_cast<const uint16_t*>(a.g) + i);
  if constexpr (grad == Grad::fp16) return V::load_fp16(static_cast<const uint16_t*>(a.g) + i);
  return V::load(static_cast<const float*>(a.g) + i);
}

// -- moments in fp32 and bf16: element by element --------------------------------------------------

template <class V, Moments moments>
typename V::F load_moment(const void* m, size_t i) {
  if constexpr (moments == Moments::bf16) return V::load_bf16(static_cast<const uint16_t*>(m) + i);
  return V::load(static_cast<const float*>(m) + i);
}

template <class V, class Rule, Moments moments, size_t number = 0>
void store_moments(const UpdateArgs& a, size_t i, const typename V::F* m, typename V::I bits) {
  if constexpr (number < Rule::moments) {
    if constexpr (moments == Moments::bf16)
      V::store_bf16(static_cast<uint16_t*>(a.m[number]) + i, m[number], share<V, number>(bits));
    else
      V::store(static_cast<float*>(a.m[number]) + i, m[number]);
    store_moments<V, Rule, moments, number + 1>(a, i, m, bits);
  }
}

// Update `count` vectors at i. All arrays are read before any is written, array by array.
template <class V, template <class> class Rule, Master master, Grad grad, Moments moments,
          size_t count>
inline __attribute__((always_inline)) void update_vectors(const UpdateArgs& a, const Rule<V>& rule,
                                                          typename V::F scale, size_t i) {
  typename V::F g[count], p[count], m[count][Rule<V>::moments];
  for (size_t n = 0; n < count; ++n)
    g[n] = V::mul(load_grad<V, grad>(a, i + n * V::width), scale);
  for (int k = 0; k < Rule<V>::moments; ++k)
    for (size_t n = 0; n < count; ++n)
      m[n][k] = load_moment<V, moments>(a.m[k], i + n * V::width);
  for (size_t n = 0; n < count; ++n) p[n] = load_master<V, master>(a, i + n * V::width);
  for (size_t n = 0; n < count; ++n) p[n] = rule(p[n], g[n], m[n]);
  for (size_t n = 0; n < count; ++n) {
    typename V::I bits{};
    if constexpr (moments == Moments::bf16) bits = chance<V>(a, i + n * V::width);
    store_moments<V, Rule<V>, moments>(a, i + n * V::width, m[n], bits);
  }
  for (size_t n = 0; n < count; ++n) store_master<V, master>(a, i + n * V::width, p[n]);
}

// Return the first element that was not updated: fewer than V::width remain. Arrays are processed
// one cache line at a time, because lines at a distance of a large power of two evict each other.
template <class V, template <class> class Rule, Master master, Grad grad, Moments moments>
size_t update_each(const UpdateArgs& args, size_t i, size_t end) {
  constexpr size_t line = V::width < kLine ? kLine / V::width : 1;
  const UpdateArgs a = args;  // a local copy: stores to the arrays cannot change it
  const Rule<V> rule(a);
  const auto scale = V::set(a.grad_scale);
  if constexpr (V::width > 1)
    for (; i + line * V::width <= end; i += line * V::width)
      update_vectors<V, Rule, master, grad, moments, line>(a, rule, scale, i);
  for (; i + V::width <= end; i += V::width)
    update_vectors<V, Rule, master, grad, moments, 1>(a, rule, scale, i);
  return i;
}

// -- moments in int8: by blocks that share a scale -------------------------------------------------

template <class V, class Rule, size_t number = 0>
void decode_all(const UpdateArgs& a, size_t i, size_t vectors,
                typename V::F (*m)[kScaled / V::width]) {
  if constexpr (number < Rule::moments) {
    decode<V, Rule::has_sign[number]>(a.m[number], a.scale[number][i / kScaled], i, vectors,
                                      m[number]);
    decode_all<V, Rule, number + 1>(a, i, vectors, m);
  }
}

// The moments of one block after the update, before they are encoded.
template <class V, int moments>
struct Block {
  typename V::F m[moments][kScaled / V::width], roots[moments][kScaled / V::width];
  typename V::I largest[moments];  // bits of the largest roots, as integers
  typename V::I bits[kScaled / V::width];
};

// This applies the rule itself, because AdamW has already computed a root.
template <class V, class Rule, size_t number = 0>
void take(Block<V, Rule::moments>& block, size_t k, const typename V::F* m) {
  if constexpr (number < Rule::moments) {
    block.m[number][k] = m[number];
    block.roots[number][k] = root<V, Rule::has_sign[number]>(m[number]);
    block.largest[number] = V::imax(block.largest[number], V::bits(block.roots[number][k]));
    take<V, Rule, number + 1>(block, k, m);
  }
}

template <class V, class Rule, size_t number = 0>
void encode_all(const UpdateArgs& a, size_t i, size_t vectors, Block<V, Rule::moments>& block) {
  if constexpr (number < Rule::moments) {
    a.scale[number][i / kScaled] = encode<V, number, Rule::has_sign[number]>(
        a.m[number], i, vectors, block.m[number], block.roots[number],
        V::largest(block.largest[number]), block.bits);
    encode_all<V, Rule, number + 1>(a, i, vectors, block);
  }
}

// Update one block of `count` elements, a multiple of V::width, at i.
template <class V, template <class> class Rule, Master master, Grad grad>
inline __attribute__((always_inline)) void update_block(const UpdateArgs& a, const Rule<V>& rule,
                                                        size_t i, size_t count) {
  const size_t vectors = count / V::width;
  const auto scale = V::set(a.grad_scale);
  Block<V, Rule<V>::moments> block;
  decode_all<V, Rule<V>>(a, i, vectors, block.m);
  for (auto& largest : block.largest) largest = V::iset(0);
  for (size_t k = 0; k < vectors; ++k) {
    const size_t at = i + k * V::width;
    auto g = V::mul(load_grad<V, grad>(a, at), scale);
    typename V::F own[Rule<V>::moments];
    for (int n = 0; n < Rule<V>::moments; ++n) own[n] = block.m[n][k];
    store_master<V, master>(a, at, rule(load_master<V, master>(a, at), g, own));
    take<V, Rule<V>>(block, k, own);
    block.bits[k] = chance<V>(a, at);
  }
  encode_all<V, Rule<V>>(a, i, vectors, block);
}

template <class V, template <class> class Rule, Master master, Grad grad>
void update_blocks(const UpdateArgs& args, size_t i, size_t end) {
  const UpdateArgs a = args;
  const Rule<V> rule(a);
  for (; i + kScaled <= end; i += kScaled) update_block<V, Rule, master, grad>(a, rule, i, kScaled);
  if (i < end) update_block<Plain, Rule, master, grad>(a, Rule<Plain>(a), i, end - i);
}

// -- selection of the kernel
// -----------------------------------------------------------------------

template <class V, template <class> class Rule, Master master, Grad grad>
void update_range(const UpdateArgs& a, size_t begin, size_t end) {
  switch (a.moments) {
    case Moments::fp32:
      begin = update_each<V, Rule, master, grad, Moments::fp32>(a, begin, end);
      update_each<Plain, Rule, master, grad, Moments::fp32>(a, begin, end);
      return;
    case Moments::bf16:
      begin = update_each<V, Rule, master, grad, Moments::bf16>(a, begin, end);
      update_each<Plain, Rule, master, grad, Moments::bf16>(a, begin, end);
      return;
    case Moments::int8:
      return update_blocks<V, Rule, master, grad>(a, begin, end);
  }
}

template <class V, template <class> class Rule>
void update_by(const UpdateArgs& a, size_t begin, size_t end) {
  const bool wide = a.grad == Grad::fp32;
  switch (a.master) {
    case Master::fp32:
      return update_range<V, Rule, Master::fp32, Grad::fp32>(a, begin, end);
    case Master::bf16_split:
      return wide ? update_range<V, Rule, Master::bf16_split, Grad::fp32>(a, begin, end)
                  : update_range<V, Rule, Master::bf16_split, Grad::bf16>(a, begin, end);
    case Master::fp16_copy:
      return wide ? update_range<V, Rule, Master::fp16_copy, Grad::fp32>(a, begin, end)
                  : update_range<V, Rule, Master::fp16_copy, Grad::fp16>(a, begin, end);
  }
}

template <class V>
void update_any(const UpdateArgs& a, size_t begin, size_t end) {
  switch (a.rule) {
    case Rule::adamw: return update_by<V, Adamw>(a, begin, end);
    case Rule::sgd: return update_by<V, Sgd>(a, begin, end);
    case Rule::lion: return update_by<V, Lion>(a, begin, end);
  }
}

// -- conversions -----------------------------------------------------------------------------------

template <class V>
void split_any(const float* p, uint16_t* w, int16_t* r, size_t i, size_t end) {
  for (; i + V::width <= end; i += V::width) V::split(w + i, r + i, V::load(p + i));
  for (; i < end; ++i) Plain::split(w + i, r + i, p[i]);
}

template <class V>
void join_any(const uint16_t* w, const int16_t* r, float* p, size_t i, size_t end) {
  for (; i + V::width <= end; i += V::width) V::store(p + i, V::join(w + i, r + i));
  for (; i < end; ++i) p[i] = Plain::join(w + i, r + i);
}

template <class V>
void to_fp16_any(const float* p, uint16_t* w, size_t i, size_t end) {
  for (; i + V::width <= end; i += V::width) V::store_fp16(w + i, V::load(p + i));
  for (; i < end; ++i) Plain::store_fp16(w + i, p[i]);
}

template <class V>
constexpr Kernels kernels_of() {
  return {update_any<V>, split_any<V>, join_any<V>, to_fp16_any<V>};
}

}  // namespace
}  // namespace lohan
