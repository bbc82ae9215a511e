// Fused AdamW: what a call is made of, and the table of kernels that each instruction set fills.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace lohan {

// How the master weights are stored.
enum class Master { fp32, bf16_split, fp16_copy };
enum class Grad { fp32, bf16, fp16 };

// Computed in double, rounded once.
struct Coefficients {
  float grad_scale;
  float decay;          // 1 - lr * weight_decay
  float one_minus_b1;
  float b2;
  float one_minus_b2;
  float inv_sqrt_bias2; // 1 / sqrt(1 - b2^t)
  float eps;
  float step_size;      // lr / (1 - b1^t)
};

struct AdamwArgs {
  Master master;
  Grad grad;
  uint16_t* w;  // bf16_split: upper half of the master, in and out; fp16_copy: output only
  int16_t* r;   // bf16_split: remainder
  float* p;     // fp32, fp16_copy: master
  float* m;
  float* v;
  const void* g;
  Coefficients c;
};

struct Kernels {
  void (*adamw)(const AdamwArgs&, size_t begin, size_t end);
  void (*split)(const float* p, uint16_t* w, int16_t* r, size_t begin, size_t end);
  void (*join)(const uint16_t* w, const int16_t* r, float* p, size_t begin, size_t end);
  void (*to_fp16)(const float* p, uint16_t* w, size_t begin, size_t end);
};

extern const Kernels kernels_plain, kernels_avx2, kernels_avx512;

Coefficients coefficients(double lr, double beta1, double beta2, double eps, double weight_decay,
                          int64_t step, double grad_scale);

// Run on the thread pool with the chosen instruction set.
void adamw(const AdamwArgs& args, size_t count);
void split(const float* p, uint16_t* w, int16_t* r, size_t count);
void join(const uint16_t* w, const int16_t* r, float* p, size_t count);
void to_fp16(const float* p, uint16_t* w, size_t count);

}  // namespace lohan
