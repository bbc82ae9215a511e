#include "sum_squares.hpp"

#include <vector>

#include "half.hpp"
#include "pool.hpp"

namespace lohan {
namespace {

constexpr size_t kBlock = 1 << 15;  // elements; fixed, so that the order of additions is fixed too
constexpr size_t kLanes = 8;

template <class T, class Load>
double block_sum(const T* x, size_t count, Load load) {
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (size_t k = 0; k < kLanes; ++k) {
      double value = load(x[i + k]);
      lanes[k] += value * value;
    }
  for (; i < count; ++i) {
    double value = load(x[i]);
    lanes[i % kLanes] += value * value;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

template <class T, class Load>
double blocked(const T* x, size_t count, Load load) {
  size_t blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> parts(blocks);
  parallel_for(blocks, [&](size_t b) {
    size_t begin = b * kBlock, end = begin + kBlock < count ? begin + kBlock : count;
    parts[b] = block_sum(x + begin, end - begin, load);
  });
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

}  // namespace

double sum_squares(const void* data, Grad type, size_t count) {
  auto half = static_cast<const uint16_t*>(data);
  switch (type) {
    case Grad::bf16: return blocked(half, count, [](uint16_t x) { return bf16_to_float(x); });
    case Grad::fp16: return blocked(half, count, [](uint16_t x) { return fp16_to_float(x); });
    default: return blocked(static_cast<const float*>(data), count, [](float x) { return x; });
  }
}

}  // namespace lohan
