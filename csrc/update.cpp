#include "update.hpp"

#include <algorithm>
#include <cmath>

#include "isa.hpp"
#include "pool.hpp"

namespace lohan {
namespace {

// Small enough that a thread delayed by the system holds the others up for microseconds only.
constexpr size_t kBlock = 32 * 1024;
static_assert(kBlock % kScaled == 0);

template <class Body>
void over_blocks(size_t count, const Body& body) {
  parallel_for((count + kBlock - 1) / kBlock, [&](size_t block) {
    body(block * kBlock, std::min(count, (block + 1) * kBlock));
  });
}

float rounded(double x) { return static_cast<float>(x); }

}  // namespace

AdamwNumbers adamw_numbers(double lr, double beta1, double beta2, double eps, double weight_decay,
                           int64_t step) {
  const double t = static_cast<double>(step);
  AdamwNumbers n;
  n.decay = rounded(1.0 - lr * weight_decay);
  n.one_minus_b1 = rounded(1.0 - beta1);
  n.b2 = rounded(beta2);
  n.one_minus_b2 = rounded(1.0 - beta2);
  n.inv_sqrt_bias2 = rounded(1.0 / std::sqrt(1.0 - std::pow(beta2, t)));
  n.eps = rounded(eps);
  n.step_size = rounded(lr / (1.0 - std::pow(beta1, t)));
  return n;
}

SgdNumbers sgd_numbers(double lr, double momentum, bool nesterov, double weight_decay) {
  return {rounded(weight_decay), rounded(momentum), rounded(lr), nesterov};
}

LionNumbers lion_numbers(double lr, double beta1, double beta2, double weight_decay) {
  return {rounded(1.0 - lr * weight_decay), rounded(beta1), rounded(1.0 - beta1),
          rounded(beta2), rounded(1.0 - beta2), rounded(lr)};
}

void update(const UpdateArgs& args, size_t count) {
  const auto kernel = kernels().update;
  over_blocks(count, [&](size_t begin, size_t end) { kernel(args, begin, end); });
}

void split(const float* p, uint16_t* w, int16_t* r, size_t count) {
  const auto kernel = kernels().split;
  over_blocks(count, [&](size_t begin, size_t end) { kernel(p, w, r, begin, end); });
}

void join(const uint16_t* w, const int16_t* r, float* p, size_t count) {
  const auto kernel = kernels().join;
  over_blocks(count, [&](size_t begin, size_t end) { kernel(w, r, p, begin, end); });
}

void to_fp16(const float* p, uint16_t* w, size_t count) {
  const auto kernel = kernels().to_fp16;
  over_blocks(count, [&](size_t begin, size_t end) { kernel(p, w, begin, end); });
}

}  // namespace lohan
