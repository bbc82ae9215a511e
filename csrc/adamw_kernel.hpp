// The kernel bodies, generic over a vector type V; included by one file per instruction set.
//
//   g = g * grad_scale
//   p = p * (1 - lr * weight_decay)
//   m = m + (g - m) * (1 - beta1)                     (torch's lerp form)
//   v = beta2 * v + ((1 - beta2) * g) * g
//   p = p - (lr / (1 - beta1^t) * m) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)
//
// Multiplying by the reciprocal of the bias correction instead of dividing leaves one division and
// one square root per element, which memory bandwidth hides.
#pragma once

#include "adamw.hpp"
#include "half.hpp"

namespace lohan {
namespace {  // local to each file: see CMakeLists.txt

struct Plain {
  static constexpr size_t width = 1;
  using F = float;
  static F set(float x) { return x; }
  static F load(const float* p) { return *p; }
  static void store(float* p, F x) { *p = x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  static F load_bf16(const uint16_t* p) { return bf16_to_float(*p); }
  static F load_fp16(const uint16_t* p) { return fp16_to_float(*p); }
  static void store_fp16(uint16_t* p, F x) { *p = float_to_fp16(x); }
  static F join(const uint16_t* w, const int16_t* r) { return join_bf16(*w, *r); }
  static void split(uint16_t* w, int16_t* r, F x) { split_bf16(x, *w, *r); }
};

template <class V, Master master>
typename V::F load_master(const AdamwArgs& a, size_t i) {
  if constexpr (master == Master::bf16_split) return V::join(a.w + i, a.r + i);
  return V::load(a.p + i);
}

template <class V, Master master>
void store_master(const AdamwArgs& a, size_t i, typename V::F p) {
  if constexpr (master == Master::bf16_split) V::split(a.w + i, a.r + i, p);
  if constexpr (master != Master::bf16_split) V::store(a.p + i, p);
  if constexpr (master == Master::fp16_copy) V::store_fp16(a.w + i, p);
}

template <class V, Grad grad>
typename V::F load_grad(const AdamwArgs& a, size_t i) {
  if constexpr (grad == Grad::bf16) return V::load_bf16(static_cast<const uint16_t*>(a.g) + i);
  if constexpr (grad == Grad::fp16) return V::load_fp16(static_cast<const uint16_t*>(a.g) + i);
  return V::load(static_cast<const float*>(a.g) + i);
}

// Returns the first element not done: fewer than V::width remain.
template <class V, Master master, Grad grad>
size_t update(const AdamwArgs& args, size_t i, size_t end) {
  const AdamwArgs a = args;  // a local copy: stores to the arrays cannot change it
  const auto scale = V::set(a.c.grad_scale), decay = V::set(a.c.decay);
  const auto one_minus_b1 = V::set(a.c.one_minus_b1), b2 = V::set(a.c.b2);
  const auto one_minus_b2 = V::set(a.c.one_minus_b2), eps = V::set(a.c.eps);
  const auto inv_sqrt_bias2 = V::set(a.c.inv_sqrt_bias2), step_size = V::set(a.c.step_size);
  for (; i + V::width <= end; i += V::width) {
    auto g = V::mul(load_grad<V, grad>(a, i), scale);
    auto p = V::mul(load_master<V, master>(a, i), decay);
    auto m = V::load(a.m + i), v = V::load(a.v + i);
    m = V::add(m, V::mul(V::sub(g, m), one_minus_b1));
    v = V::add(V::mul(b2, v), V::mul(V::mul(one_minus_b2, g), g));
    auto denominator = V::add(V::mul(V::sqrt(v), inv_sqrt_bias2), eps);
    p = V::sub(p, V::div(V::mul(step_size, m), denominator));
    V::store(a.m + i, m);
    V::store(a.v + i, v);
    store_master<V, master>(a, i, p);
  }
  return i;
}

template <class V, Master master, Grad grad>
void adamw_range(const AdamwArgs& a, size_t begin, size_t end) {
  update<Plain, master, grad>(a, update<V, master, grad>(a, begin, end), end);
}

template <class V>
void adamw_any(const AdamwArgs& a, size_t begin, size_t end) {
  const bool wide = a.grad == Grad::fp32;
  switch (a.master) {
    case Master::fp32:
      return adamw_range<V, Master::fp32, Grad::fp32>(a, begin, end);
    case Master::bf16_split:
      return wide ? adamw_range<V, Master::bf16_split, Grad::fp32>(a, begin, end)
                  : adamw_range<V, Master::bf16_split, Grad::bf16>(a, begin, end);
    case Master::fp16_copy:
      return wide ? adamw_range<V, Master::fp16_copy, Grad::fp32>(a, begin, end)
                  : adamw_range<V, Master::fp16_copy, Grad::fp16>(a, begin, end);
  }
}

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
  return {adamw_any<V>, split_any<V>, join_any<V>, to_fp16_any<V>};
}

}  // namespace
}  // namespace lohan
