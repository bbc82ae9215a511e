// The arithmetic of each optimizer on one vector of elements, generic over a vector type V. It
// reads and writes the master p and the moments m, and reads the scaled gradient g. A new optimizer
// is a struct here, an entry in Rule and in update_any, and a table entry in lohan/optim.py.
#pragma once

#include "update.hpp"

namespace lohan {
namespace {  // local to each file: see CMakeLists.txt

//   p = p * (1 - lr * weight_decay)
//   m = m + (g - m) * (1 - beta1)                     (torch's lerp form)
//   v = beta2 * v + ((1 - beta2) * g) * g
//   p = p - (lr / (1 - beta1^t) * m) / (sqrt(v) * (1 / sqrt(1 - beta2^t)) + eps)
//
// Multiplying by the reciprocal of the bias correction instead of dividing leaves one division and
// one square root per element, which memory bandwidth hides.
template <class V>
struct Adamw {
  using F = typename V::F;
  static constexpr int moments = 2;
  static constexpr bool has_sign[] = {true, false};
  F decay, one_minus_b1, b2, one_minus_b2, inv_sqrt_bias2, eps, step_size;

  explicit Adamw(const UpdateArgs& a)
      : decay(V::set(a.adamw.decay)),
        one_minus_b1(V::set(a.adamw.one_minus_b1)),
        b2(V::set(a.adamw.b2)),
        one_minus_b2(V::set(a.adamw.one_minus_b2)),
        inv_sqrt_bias2(V::set(a.adamw.inv_sqrt_bias2)),
        eps(V::set(a.adamw.eps)),
        step_size(V::set(a.adamw.step_size)) {}

  F operator()(F p, F g, F (&moment)[moments]) const {
    F m = moment[0], v = moment[1];
    p = V::mul(p, decay);
    m = V::add(m, V::mul(V::sub(g, m), one_minus_b1));
    v = V::add(V::mul(b2, v), V::mul(V::mul(one_minus_b2, g), g));
    moment[0] = m;
    moment[1] = v;
    const F denominator = V::add(V::mul(V::sqrt(v), inv_sqrt_bias2), eps);
    return V::sub(p, V::div(V::mul(step_size, m), denominator));
  }
};

//   g = g + weight_decay * p                          (not decoupled, as torch has it)
//   m = momentum * m + g
//   p = p - lr * m                                    (nesterov: g + momentum * m for m)
template <class V>
struct Sgd {
  using F = typename V::F;
  static constexpr int moments = 1;
  static constexpr bool has_sign[] = {true};
  F weight_decay, momentum, lr;
  bool nesterov;

  explicit Sgd(const UpdateArgs& a)
      : weight_decay(V::set(a.sgd.weight_decay)),
        momentum(V::set(a.sgd.momentum)),
        lr(V::set(a.sgd.lr)),
        nesterov(a.sgd.nesterov) {}

  F operator()(F p, F g, F (&moment)[moments]) const {
    g = V::add(g, V::mul(weight_decay, p));
    const F m = V::add(V::mul(momentum, moment[0]), g);
    moment[0] = m;
    return V::sub(p, V::mul(lr, nesterov ? V::add(g, V::mul(momentum, m)) : m));
  }
};

//   p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
//   m = beta2 * m + (1 - beta2) * g
template <class V>
struct Lion {
  using F = typename V::F;
  static constexpr int moments = 1;
  static constexpr bool has_sign[] = {true};
  F decay, b1, one_minus_b1, b2, one_minus_b2, lr;

  explicit Lion(const UpdateArgs& a)
      : decay(V::set(a.lion.decay)),
        b1(V::set(a.lion.b1)),
        one_minus_b1(V::set(a.lion.one_minus_b1)),
        b2(V::set(a.lion.b2)),
        one_minus_b2(V::set(a.lion.one_minus_b2)),
        lr(V::set(a.lion.lr)) {}

  F operator()(F p, F g, F (&moment)[moments]) const {
    const F m = moment[0];
    const F way = V::add(V::mul(b1, m), V::mul(one_minus_b1, g));
    moment[0] = V::add(V::mul(b2, m), V::mul(one_minus_b2, g));
    return V::sub(V::mul(p, decay), V::with_sign(lr, way));
  }
};

}  // namespace
}  // namespace lohan
