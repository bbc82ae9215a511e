// Fused optimizer updates: the arguments of a call, and the table of kernels that each instruction
// set fills.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace lohan {

// How the master weights are stored.
enum class Master { fp32, bf16_split, fp16_copy };
enum class Grad { fp32, bf16, fp16 };
// How moments are stored; see moments.hpp.
enum class Moments { fp32, bf16, int8 };
enum class Rule { adamw, sgd, lion };

constexpr int kMostMoments = 2;
constexpr size_t kScaled = 32;  // elements of a moment in int8 that share a scale

// The numbers of the rules, computed in double precision and rounded once.
struct AdamwNumbers {
  float decay;          // 1 - lr * weight_decay
  float one_minus_b1;
  float b2;
  float one_minus_b2;
  float inv_sqrt_bias2; // 1 / sqrt(1 - b2^t)
  float eps;
  float step_size;      // lr / (1 - b1^t)
};

struct SgdNumbers {
  float weight_decay;
  float momentum;
  float lr;
  bool nesterov;
};

struct LionNumbers {
  float decay;  // 1 - lr * weight_decay
  float b1, one_minus_b1;
  float b2, one_minus_b2;
  float lr;
};

struct UpdateArgs {
  Rule rule;
  Master master;
  Grad grad;
  Moments moments;
  uint16_t* w;  // bf16_split: upper half of the master, in and out; fp16_copy: output only
  int16_t* r;   // bf16_split: remainder
  float* p;     // fp32, fp16_copy: master
  void* m[kMostMoments];
  float* scale[kMostMoments];  // for int8: one scale for every kScaled elements
  const void* g;
  float grad_scale;
  uint32_t seed;  // seed for rounding moments that are not fp32
  uint32_t first;  // index of the first element, which determines its random bits
  union {
    AdamwNumbers adamw;
    SgdNumbers sgd;
    LionNumbers lion;
  };
};

struct Kernels {
  // `begin` must be a multiple of kScaled
  void (*update)(const UpdateArgs&, size_t begin, size_t end);
  void (*split)(const float* p, uint16_t* w, int16_t* r, size_t begin, size_t end);
  void (*join)(const uint16_t* w, const int16_t* r, float* p, size_t begin, size_t end);
  void (*to_fp16)(const float* p, uint16_t* w, size_t begin, size_t end);
};

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512;

AdamwNumbers adamw_numbers(double lr, double beta1, double beta2, double eps, double weight_decay,
                           int64_t step);
SgdNumbers sgd_numbers(double lr, double momentum, bool nesterov, double weight_decay);
LionNumbers lion_numbers(double lr, double beta1, double beta2, double weight_decay);

// An array that an update writes; `per` elements of the update share one item of the array.
struct Written {
  const void* data;
  size_t item_bytes, per;
};

// Apply consecutive updates of the same arrays, which differ in gradients and numbers, in one pass
// over main memory, on the thread pool with the chosen instruction set. The bits are those of one
// pass per update. With `checksums`, return the CRC-32C of each array in `written`, computed piece
// by piece while the piece is in the cache.
void update(const std::vector<UpdateArgs>& updates, size_t count,
            const std::vector<Written>& written, std::vector<uint32_t>* checksums);
void split(const float* p, uint16_t* w, int16_t* r, size_t count);
void join(const uint16_t* w, const int16_t* r, float* p, size_t count);
void to_fp16(const float* p, uint16_t* w, size_t count);

}  // namespace lohan
