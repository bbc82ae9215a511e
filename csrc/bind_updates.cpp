// Python functions for optimizer updates: RULE_fp32, RULE_bf16 and RULE_fp16, by how the master
// weights are stored. RULE_fp32_updates and so on apply several updates in one pass.
#include <nanobind/stl/vector.h>

#include <cmath>

#include "arrays.hpp"
#include "update.hpp"

namespace lohan {
namespace {

using namespace nb::literals;

// The arrays of one call, added one by one: written arrays first.
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
    gradients_.push_back({"g", a});
  }

  void numbers(double grad_scale, uint32_t seed, uint32_t first) {
    if (!std::isfinite(grad_scale)) refuse_value("grad_scale", "must be finite");
    args.grad_scale = static_cast<float>(grad_scale);
    args.seed = seed;
    args.first = first;
  }

  // Add the update with these `args` and the last gradient to the updates that `run` applies.
  void add_update() { updates_.push_back(args); }

  // With `checksums`, return those of the written arrays: weights, master or remainder, moments,
  // scales.
  nb::object run(nb::sequence scales, bool checksums) {
    std::vector<Named> all = arrays_;
    all.insert(all.end(), gradients_.begin(), gradients_.end());
    const size_t count = common_size(all);
    take_scales(scales, count);
    std::vector<Written> written;
    for (const Named& a : arrays_)
      written.push_back({a.array.data, a.array.item_bytes, a.array.size == count ? 1 : kScaled});
    all = arrays_;
    all.insert(all.end(), gradients_.begin(), gradients_.end());
    check_apart(all, arrays_.size());
    for (UpdateArgs& update : updates_)
      for (size_t k = 0; k < kMostMoments; ++k) update.scale[k] = args.scale[k];
    std::vector<uint32_t> sums;
    {
      nb::gil_scoped_release release;
      update(updates_, count, written, checksums ? &sums : nullptr);
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

  void take_scales(nb::sequence scales, size_t count) {
    const size_t wanted = args.moments == Moments::int8 ? moments_ : 0;
    if (nb::len(scales) != wanted)
      refuse_value("scales", "must be " + std::to_string(wanted) + " arrays, got " +
                                 std::to_string(nb::len(scales)));
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
  }

  std::vector<Named> arrays_;  // the written arrays
  std::vector<Named> gradients_;
  std::vector<UpdateArgs> updates_;
  size_t moments_ = 0;
};

void check_positive(const char* name, double x) {
  if (!(x >= 0) || !std::isfinite(x)) refuse_value(name, "must be finite and not negative");
}

void check_share(const char* name, double x) {
  if (!(x >= 0 && x < 1)) refuse_value(name, "must be in [0, 1)");
}

// The arguments that all rules share, besides their own numbers.
struct Rest {
  double grad_scale;
  nb::sequence scales;
  uint32_t seed, first;
  bool checksums;
};

void adamw_update(Call& call, nb::handle g, double lr, double beta1, double beta2, double eps,
                  double weight_decay, int64_t step, double grad_scale, uint32_t seed,
                  uint32_t first) {
  call.gradient(g);
  check_positive("lr", lr);
  check_share("beta1", beta1);
  check_share("beta2", beta2);
  check_positive("eps", eps);
  check_positive("weight_decay", weight_decay);
  if (step < 1) refuse_value("step", "counts from 1, got " + std::to_string(step));
  call.args.adamw = adamw_numbers(lr, beta1, beta2, eps, weight_decay, step);
  call.numbers(grad_scale, seed, first);
  call.add_update();
}

void sgd_update(Call& call, nb::handle g, double lr, double momentum, bool nesterov,
                double weight_decay, double grad_scale, uint32_t seed, uint32_t first) {
  call.gradient(g);
  check_positive("lr", lr);
  check_share("momentum", momentum);
  check_positive("weight_decay", weight_decay);
  call.args.sgd = sgd_numbers(lr, momentum, nesterov, weight_decay);
  call.numbers(grad_scale, seed, first);
  call.add_update();
}

void lion_update(Call& call, nb::handle g, double lr, double beta1, double beta2,
                 double weight_decay, double grad_scale, uint32_t seed, uint32_t first) {
  call.gradient(g);
  check_positive("lr", lr);
  check_share("beta1", beta1);
  check_share("beta2", beta2);
  check_positive("weight_decay", weight_decay);
  call.args.lion = lion_numbers(lr, beta1, beta2, weight_decay);
  call.numbers(grad_scale, seed, first);
  call.add_update();
}

nb::object adamw(Call call, nb::handle m, nb::handle v, nb::handle g, double lr, double beta1,
                 double beta2, double eps, double weight_decay, int64_t step, const Rest& rest) {
  call.moment("m", m, true);
  call.moment("v", v, false);
  adamw_update(call, g, lr, beta1, beta2, eps, weight_decay, step, rest.grad_scale, rest.seed,
               rest.first);
  return call.run(rest.scales, rest.checksums);
}

nb::object sgd(Call call, nb::handle m, nb::handle g, double lr, double momentum, bool nesterov,
               double weight_decay, const Rest& rest) {
  call.moment("m", m, true);
  sgd_update(call, g, lr, momentum, nesterov, weight_decay, rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

nb::object lion(Call call, nb::handle m, nb::handle g, double lr, double beta1, double beta2,
                double weight_decay, const Rest& rest) {
  call.moment("m", m, true);
  lion_update(call, g, lr, beta1, beta2, weight_decay, rest.grad_scale, rest.seed, rest.first);
  return call.run(rest.scales, rest.checksums);
}

// -- several updates in one pass ------------------------------------------------------------------

// The keywords of one update; each of them must be used.
class Numbers {
 public:
  explicit Numbers(nb::handle given) : given_(nb::cast<nb::dict>(given)) {}

  template <class T>
  T operator()(const char* name) {
    if (!given_.contains(name)) refuse_type("updates", std::string("lack ") + name);
    ++used_;
    return nb::cast<T>(given_[name]);
  }

  void check_all_used() const {
    if (used_ != nb::len(given_))
      refuse_type("updates", "have " + std::to_string(nb::len(given_)) + " keywords, " +
                                 std::to_string(used_) + " are known");
  }

 private:
  nb::dict given_;
  size_t used_ = 0;
};

void add_updates(Call& call, nb::sequence gradients, nb::sequence updates, uint32_t first) {
  const size_t count = nb::len(gradients);
  if (count == 0 || nb::len(updates) != count)
    refuse_value("updates", "must be one for each gradient and at least one, got " +
                                std::to_string(nb::len(updates)) + " for " +
                                std::to_string(count) + " gradients");
  for (size_t i = 0; i < count; ++i) {
    Numbers n{nb::object(updates[i])};
    const nb::object g = gradients[i];
    const auto lr = n.operator()<double>("lr"), decay = n.operator()<double>("weight_decay");
    const auto scale = n.operator()<double>("grad_scale");
    const auto seed = n.operator()<uint32_t>("seed");
    switch (call.args.rule) {
      case Rule::adamw: {
        const auto beta1 = n.operator()<double>("beta1"), beta2 = n.operator()<double>("beta2");
        const auto eps = n.operator()<double>("eps");
        adamw_update(call, g, lr, beta1, beta2, eps, decay, n.operator()<int64_t>("step"), scale,
                     seed, first);
        break;
      }
      case Rule::sgd: {
        const auto momentum = n.operator()<double>("momentum");
        sgd_update(call, g, lr, momentum, n.operator()<bool>("nesterov"), decay, scale, seed,
                   first);
        break;
      }
      case Rule::lion: {
        const auto beta1 = n.operator()<double>("beta1"), beta2 = n.operator()<double>("beta2");
        lion_update(call, g, lr, beta1, beta2, decay, scale, seed, first);
        break;
      }
    }
    n.check_all_used();
  }
}

nb::object apply_updates(Call call, std::initializer_list<nb::handle> moments,
                         nb::sequence gradients, nb::sequence updates, nb::sequence scales,
                         uint32_t first, bool checksums) {
  bool has_sign = true;  // AdamW's second moment has no sign
  for (nb::handle m : moments) {
    call.moment(has_sign ? "m" : "v", m, has_sign);
    has_sign = false;
  }
  add_updates(call, gradients, updates, first);
  return call.run(scales, checksums);
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

#define LOHAN_SEVERAL \
  nb::sequence gradients, nb::sequence updates, nb::sequence scales, uint32_t first, bool checksums
#define LOHAN_SEVERAL_NAMES                                                             \
  "gradients"_a, nb::kw_only(), "updates"_a, "scales"_a = nb::make_tuple(), "first"_a = 0, \
      "checksums"_a = false
#define LOHAN_SEVERAL_VALUES gradients, updates, scales, first, checksums
#define LOHAN_SEVERAL_TEXT \
  "Apply one update for each gradient, in order and in one pass, with the same bits as one call " \
  "for each. `updates` are the keywords of those calls."
  m.def("adamw_fp32_updates", [](H p, H m, H v, LOHAN_SEVERAL) {
    return apply_updates(fp32(Rule::adamw, p), {m, v}, LOHAN_SEVERAL_VALUES);
  }, "p"_a, "m"_a, "v"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("adamw_bf16_updates", [](H w, H r, H m, H v, LOHAN_SEVERAL) {
    return apply_updates(bf16(Rule::adamw, w, r), {m, v}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "r"_a, "m"_a, "v"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("adamw_fp16_updates", [](H w, H p, H m, H v, LOHAN_SEVERAL) {
    return apply_updates(fp16(Rule::adamw, w, p), {m, v}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "p"_a, "m"_a, "v"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("sgd_fp32_updates", [](H p, H m, LOHAN_SEVERAL) {
    return apply_updates(fp32(Rule::sgd, p), {m}, LOHAN_SEVERAL_VALUES);
  }, "p"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("sgd_bf16_updates", [](H w, H r, H m, LOHAN_SEVERAL) {
    return apply_updates(bf16(Rule::sgd, w, r), {m}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "r"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("sgd_fp16_updates", [](H w, H p, H m, LOHAN_SEVERAL) {
    return apply_updates(fp16(Rule::sgd, w, p), {m}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "p"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("lion_fp32_updates", [](H p, H m, LOHAN_SEVERAL) {
    return apply_updates(fp32(Rule::lion, p), {m}, LOHAN_SEVERAL_VALUES);
  }, "p"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("lion_bf16_updates", [](H w, H r, H m, LOHAN_SEVERAL) {
    return apply_updates(bf16(Rule::lion, w, r), {m}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "r"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
  m.def("lion_fp16_updates", [](H w, H p, H m, LOHAN_SEVERAL) {
    return apply_updates(fp16(Rule::lion, w, p), {m}, LOHAN_SEVERAL_VALUES);
  }, "w"_a, "p"_a, "m"_a, LOHAN_SEVERAL_NAMES, LOHAN_SEVERAL_TEXT);
#undef LOHAN_SEVERAL
#undef LOHAN_SEVERAL_NAMES
#undef LOHAN_SEVERAL_VALUES
#undef LOHAN_SEVERAL_TEXT
}

}  // namespace lohan
