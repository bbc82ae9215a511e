#include "adamw.hpp"

#include <algorithm>
#include <cmath>

#include "isa.hpp"
#include "pool.hpp"

namespace lohan {
namespace {

// Small enough that a thread delayed by the system holds the others up for microseconds only.
constexpr size_t kBlock = 32 * 1024;

template <class Body>
void over_blocks(size_t count, const Body& body) {
  parallel_for((count + kBlock - 1) / kBlock, [&](size_t block) {
    body(block * kBlock, std::min(count, (block + 1) * kBlock));
  });
}

}  // namespace

Coefficients coefficients(double lr, double beta1, double beta2, double eps, double weight_decay,
                          int64_t step, double grad_scale) {
  const double t = static_cast<double>(step);
  Coefficients c;
  c.grad_scale = static_cast<float>(grad_scale);
  c.decay = static_cast<float>(1.0 - lr * weight_decay);
  c.one_minus_b1 = static_cast<float>(1.0 - beta1);
  c.b2 = static_cast<float>(beta2);
  c.one_minus_b2 = static_cast<float>(1.0 - beta2);
  c.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, t)));
  c.eps = static_cast<float>(eps);
  c.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, t)));
  return c;
}

void adamw(const AdamwArgs& args, size_t count) {
  const auto kernel = kernels().adamw;
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
