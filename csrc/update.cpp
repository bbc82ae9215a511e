#include "update.hpp"

#include <algorithm>
#include <cmath>

#include "crc32c.hpp"
#include "isa.hpp"
#include "pool.hpp"

namespace lohan {
namespace {

// It is small, so that a thread delayed by the system delays the others by microseconds only.
constexpr size_t kBlock = 24 * 1024;
// The number of elements that are checksummed at a time, right after their update. All their arrays
// fit in a core's own cache, and 16-bit arrays are as long as the checksum's longest stride.
constexpr size_t kHot = 12 * 1024;
// The number of elements that get all of several updates before the next ones do. With their
// gradients they fit into the first-level or second-level cache of a core.
constexpr size_t kTile = 2 * 1024;
static_assert(kBlock % kHot == 0 && kHot % kTile == 0 && kTile % kScaled == 0);

template <class Body>
void over_blocks(size_t count, const Body& body) {
  parallel_for((count + kBlock - 1) / kBlock, [&](size_t block) {
    body(block * kBlock, std::min(count, (block + 1) * kBlock));
  });
}

// Return the bytes of an array that belong to elements before `end`. A block of `per` elements
// counts if it begins there.
size_t bytes_before(const Written& array, size_t end) {
  return (end + array.per - 1) / array.per * array.item_bytes;
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

void update(const std::vector<UpdateArgs>& updates, size_t count,
            const std::vector<Written>& written, std::vector<uint32_t>* checksums) {
  const auto kernel = kernels().update;
  const auto update_range = [&](size_t begin, size_t end) {
    const size_t tile = updates.size() > 1 ? kTile : end - begin;
    for (size_t i = begin; i < end; i += tile)
      for (const UpdateArgs& args : updates) kernel(args, i, std::min(end, i + tile));
  };
  if (checksums == nullptr) {
    over_blocks(count, update_range);
    return;
  }
  const size_t arrays = written.size(), blocks = (count + kBlock - 1) / kBlock;
  // each thread writes the entries of its own blocks
  std::vector<uint32_t> parts(blocks * arrays, 0);
  over_blocks(count, [&](size_t begin, size_t end) {
    uint32_t* crcs = parts.data() + begin / kBlock * arrays;
    for (size_t i = begin; i < end; i += kHot) {
      const size_t stop = std::min(end, i + kHot);
      update_range(i, stop);
      for (size_t k = 0; k < arrays; ++k) {
        const size_t from = bytes_before(written[k], i), to = bytes_before(written[k], stop);
        crcs[k] = crc32c(static_cast<const char*>(written[k].data) + from, to - from, crcs[k]);
      }
    }
  });
  checksums->assign(arrays, 0);
  for (size_t k = 0; k < arrays; ++k) {
    const uint32_t over_block = crc32c_factor(bytes_before(written[k], kBlock));
    for (size_t block = 0; block < blocks; ++block) {
      const size_t begin = block * kBlock, rest = count - begin;
      const uint32_t factor =
          rest >= kBlock ? over_block : crc32c_factor(bytes_before(written[k], rest));
      uint32_t& crc = (*checksums)[k];
      crc = crc32c_combine(crc, parts[block * arrays + k], factor);
    }
  }
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
