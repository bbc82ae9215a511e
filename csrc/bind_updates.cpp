// Python functions for optimizer updates: RULE_fp32, RULE_bf16 and RULE_fp16 by how the master
// weights are stored.
#include <nanobind/stl/vector.h>

#include <cmath>

#include "arrays.hpp"
#include "update.hpp"

namespace lohan {
namespace {

using namespace nb::literals;

// The arrays of one call, taken one by one: those that are written first.
class Call {
 public:
  explicit Call(Rule rule) { args.rule = rule; }

  void master_fp32(nb::handle p) {
    args.master = Master::fp32;
    args.p = static_cast<float*>(written("p", p, {Type::f32}, "float32"));
  }

  void master_bf16(nb::handle w, nb::handle r) {
    args.master = Master::bf16_split;
    args.w = static_cast<uint16_t*>(
        written("w", w, {Type::u16, Type::bf16}, "uint16 or bfloat16"));
    args.r = static_cast<int16_t*>(written("r", r, {Type::i16}, "int16"));
  }

  void master_fp16(nb::handle w, nb::handle p) {
    args.master = Master::fp16_copy;
    args.w = static_cast<uint16_t*>(written("w", w, {Type::u16, Type::f16}, "uint16 or float16"));
    args.p = static_cast<float*>(written("p", p, {Type::f32}, "float32"));
  }

  void moment(const char* name, nb::handle m, bool has_sign) {
    const Type code = has_sign ? Type::i8 : Type::u8;
    const char* text = has_sign ? "float32, bfloat16, uint16 or int8"
                                : "float32, bfloat16, uint16 or uint8";
    args.m[moments_] = written(name, m, {Type::f32, Type::bf16, Type::u16, code}, text, 1);
    const Array& a = arrays_.back().array;
    const Moments kind = a.type == Type::f32   ? Moments::fp32
                         : a.item_bytes == 2   ? Moments::bf16
                                               : Moments::int8;
    const auto address = reinterpret_cast<uintptr_t>(a.data);
    if (a.size > 0) check_aligned(name, address, kind == Moments::int8 ? kScaled : kWriteAlign);
    if (moments_++ > 0 && kind != args.moments) refuse_type(name, "must be stored as m is");
    args.moments = kind;
  }

  void gradient(nb::handle g) {
    Array a;
    switch (args.master) {
      case Master::fp32:
        a = array_argument(g, "g", Access::read, {Type::f32}, "float32");
        break;
      case Master::bf16_split:
        a = array_argument(g, "g", Access::read, {Type::u16, Type::bf16, Type::f32},
                           "uint16, bfloat16 or float32");
        break;
      case Master::fp16_copy:
        a = array_argument(g, "g", Access::read, {Type::u16, Type::f16, Type::f32},
                           "uint16, float16 or float32");
        break;
    }
    const Grad narrow = args.master == Master::bf16_split ? Grad::bf16 : Grad::fp16;
    args.grad = a.type == Type::f32 ? Grad::fp32 : narrow;
    args.g = a.data;
    arrays_.push_back({"g", a});
  }

  void numbers(double grad_scale, uint32_t seed, uint32_t first) {
    if (!std::isfinite(grad_scale)) refuse_value("grad_scale", "must be finite");
    args.grad_scale = static_cast<float>(grad_scale);
    args.seed = seed;
    args.first = first;
  }

  // With `checksums`, those of the written arrays: weights, what is beside them, moments, scales.
  nb::object run(nb::sequence scales, bool checksums) {
    const size_t count = common_size(arrays_);
    take_scales(scales, count);
    check_apart(arrays_, arrays_.size() - 1);
    std::vector<Written> written;
    for (const Named& a : arrays_)
      written.push_back({a.array.data, a.array.item_bytes, a.array.size == count ? 1 : kScaled});
    written.pop_back();  // the gradient
    std::vector<uint32_t> sums;
    {
      nb::gil_scoped_release release;
      update(args, count, written, checksums ? &sums : nullptr);
    }
    return checksums ? nb::cast(sums) : nb::none();
  }

  UpdateArgs args{};

 private:
  void* written(const char* name, nb::handle o, std::initializer_list<Type> types,
                const char* text, size_t align = kWriteAlign) {
    arrays_.push_back({name, array_argument(o, name, Access::write, types, text, align)});
    return arrays_.back().array.data;
  }

  // They go before the gradient, which alone is only read.
  void take_scales(nb::sequence scales, size_t count) {
    const size_t wanted = args.moments == Moments::int8 ? moments_ : 0;
    if (nb::len(scales) != wanted)
      refuse_value("scales", "must be " + std::to_string(wanted) + " arrays, got " +
                                 std::to_string(nb::len(scales)));
    const Named gradient = arrays_.back();
    arrays_.pop_back();
    for (size_t k = 0; k < wanted; ++k) {
      args.scale[k] = static_cast<float*>(
          written("scales", nb::object(scales[k]), {Type::f32}, "float32", sizeof(float)));
      const size_t found = arrays_.back().array.size, blocks = (count + kScaled - 1) / kScaled;
      if (found != blocks)
        refuse_value("scales", "have " + std::to_string(found) + " elements, " +
                                   std::to_string(count) + " parameters have " +
                                   std::to_string(blocks) + " blocks of " +
                                   std::to_string(kScaled));
    }
    arrays_.push_back(gradient);
  }

  std::vector<Named> arrays_;
  size_t moments_ = 0;
};

void check_positive(const char* name, double x) {
  if (!(x >= 0) || !std::isfinite(x)) refuse_value(name, "must be finite and not negative");
}

void check_share(const char* name, double x) {
  if (!(x >= 0 && x < 1)) refuse_value(name, "must be in [0, 1)");
}

// What every rule has besides its own numbers.
struct Rest {
  double grad_scale;
  nb::sequence scales;
  uint32_t seed, first;
  bool checksums;
};

nb::object adamw(Call call, nb::handle m, nb::handle v, nb::handle g, double lr, double beta1,
                 double beta2, double eps, double weight_decay, int64_t step, const Rest& rest) {
  call.moment("m", m, true);
  call.moment("v", v, false);
  call.gradient(g);
  check_positive("lr", lr);
  check_share("beta1", beta1);
  check_share("beta2", beta2);
  check_positive("eps", eps);
  check_positive("weight_decay", weight_decay);
  if (step < 1) refuse_value("step", "counts from 1, got " + std::to_string(step));
  call.args.adamw = adamw_numbers(lr, beta1, beta2, eps, weight_decay, step);
  call.numbers(rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

nb::object sgd(Call call, nb::handle m, nb::handle g, double lr, double momentum, bool nesterov,
               double weight_decay, const Rest& rest) {
  call.moment("m", m, true);
  call.gradient(g);
  check_positive("lr", lr);
  check_share("momentum", momentum);
  check_positive("weight_decay", weight_decay);
  call.args.sgd = sgd_numbers(lr, momentum, nesterov, weight_decay);
  call.numbers(rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

nb::object lion(Call call, nb::handle m, nb::handle g, double lr, double beta1, double beta2,
                double weight_decay, const Rest& rest) {
  call.moment("m", m, true);
  call.gradient(g);
  check_positive("lr", lr);
  check_share("beta1", beta1);
  check_share("beta2", beta2);
  check_positive("weight_decay", weight_decay);
  call.args.lion = lion_numbers(lr, beta1, beta2, weight_decay);
  call.numbers(rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

Call fp32(Rule rule, nb::handle p) {
  Call call(rule);
  call.master_fp32(p);
  return call;
}

Call bf16(Rule rule, nb::handle w, nb::handle r) {
  Call call(rule);
  call.master_bf16(w, r);
  return call;
}

Call fp16(Rule rule, nb::handle w, nb::handle p) {
  Call call(rule);
  call.master_fp16(w, p);
  return call;
}

}  // namespace

void bind_updates(nb::module_& m) {
  using H = nb::handle;
#define LOHAN_REST \
  double grad_scale, nb::sequence scales, uint32_t seed, uint32_t first, bool checksums
#define LOHAN_REST_NAMES                                                          \
  "grad_scale"_a = 1.0, "scales"_a = nb::make_tuple(), "seed"_a = 0, "first"_a = 0, \
      "checksums"_a = false
#define LOHAN_REST_VALUES Rest{grad_scale, scales, seed, first, checksums}

#define LOHAN_NUMBERS double lr, double b1, double b2, double eps, double decay, int64_t step
#define LOHAN_NAMES \
  nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, LOHAN_REST_NAMES
#define LOHAN_VALUES lr, b1, b2, eps, decay, step, LOHAN_REST_VALUES
  m.def("adamw_fp32", [](H p, H m, H v, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return adamw(fp32(Rule::adamw, p), m, v, g, LOHAN_VALUES);
  }, "p"_a, "m"_a, "v"_a, "g"_a, LOHAN_NAMES, "One AdamW step on p, m and v, in place.");
  m.def("adamw_bf16", [](H w, H r, H m, H v, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return adamw(bf16(Rule::adamw, w, r), m, v, g, LOHAN_VALUES);
  }, "w"_a, "r"_a, "m"_a, "v"_a, "g"_a, LOHAN_NAMES,
        "One AdamW step on the master (w << 16) + r and on m and v, in place.");
  m.def("adamw_fp16", [](H w, H p, H m, H v, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return adamw(fp16(Rule::adamw, w, p), m, v, g, LOHAN_VALUES);
  }, "w"_a, "p"_a, "m"_a, "v"_a, "g"_a, LOHAN_NAMES,
        "One AdamW step on p, m and v, in place; w becomes p rounded to float16.");
#undef LOHAN_NUMBERS
#undef LOHAN_NAMES
#undef LOHAN_VALUES

#define LOHAN_NUMBERS double lr, double momentum, bool nesterov, double decay
#define LOHAN_NAMES \
  nb::kw_only(), "lr"_a, "momentum"_a, "nesterov"_a, "weight_decay"_a, LOHAN_REST_NAMES
#define LOHAN_VALUES lr, momentum, nesterov, decay, LOHAN_REST_VALUES
  m.def("sgd_fp32", [](H p, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return sgd(fp32(Rule::sgd, p), m, g, LOHAN_VALUES);
  }, "p"_a, "m"_a, "g"_a, LOHAN_NAMES, "One SGD step on p and its momentum m, in place.");
  m.def("sgd_bf16", [](H w, H r, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return sgd(bf16(Rule::sgd, w, r), m, g, LOHAN_VALUES);
  }, "w"_a, "r"_a, "m"_a, "g"_a, LOHAN_NAMES,
        "One SGD step on the master (w << 16) + r and its momentum m, in place.");
  m.def("sgd_fp16", [](H w, H p, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return sgd(fp16(Rule::sgd, w, p), m, g, LOHAN_VALUES);
  }, "w"_a, "p"_a, "m"_a, "g"_a, LOHAN_NAMES,
        "One SGD step on p and its momentum m, in place; w becomes p rounded to float16.");
#undef LOHAN_NUMBERS
#undef LOHAN_NAMES
#undef LOHAN_VALUES

#define LOHAN_NUMBERS double lr, double b1, double b2, double decay
#define LOHAN_NAMES \
  nb::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "weight_decay"_a, LOHAN_REST_NAMES
#define LOHAN_VALUES lr, b1, b2, decay, LOHAN_REST_VALUES
  m.def("lion_fp32", [](H p, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return lion(fp32(Rule::lion, p), m, g, LOHAN_VALUES);
  }, "p"_a, "m"_a, "g"_a, LOHAN_NAMES, "One Lion step on p and m, in place.");
  m.def("lion_bf16", [](H w, H r, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return lion(bf16(Rule::lion, w, r), m, g, LOHAN_VALUES);
  }, "w"_a, "r"_a, "m"_a, "g"_a, LOHAN_NAMES,
        "One Lion step on the master (w << 16) + r and on m, in place.");
  m.def("lion_fp16", [](H w, H p, H m, H g, LOHAN_NUMBERS, LOHAN_REST) {
    return lion(fp16(Rule::lion, w, p), m, g, LOHAN_VALUES);
  }, "w"_a, "p"_a, "m"_a, "g"_a, LOHAN_NAMES,
        "One Lion step on p and m, in place; w becomes p rounded to float16.");
#undef LOHAN_NUMBERS
#undef LOHAN_NAMES
#undef LOHAN_VALUES
#undef LOHAN_REST
#undef LOHAN_REST_NAMES
#undef LOHAN_REST_VALUES
}

}  // namespace lohan
