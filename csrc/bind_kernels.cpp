// Python functions for conversions, sums and checksum, and settings of the kernels.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "crc32c.hpp"
#include "isa.hpp"
#include "pool.hpp"
#include "sum_squares.hpp"

namespace lohan {
namespace {

using namespace nb::literals;

Array write_f32(nb::handle o, const char* name) {
  return array_argument(o, name, Access::write, {Type::f32}, "float32");
}
Array write_bf16(nb::handle o, const char* name) {
  return array_argument(o, name, Access::write, {Type::u16, Type::bf16}, "uint16 or bfloat16");
}
Array write_fp16(nb::handle o, const char* name) {
  return array_argument(o, name, Access::write, {Type::u16, Type::f16}, "uint16 or float16");
}
Array write_i16(nb::handle o, const char* name) {
  return array_argument(o, name, Access::write, {Type::i16}, "int16");
}
Array read_f32(nb::handle o, const char* name) {
  return array_argument(o, name, Access::read, {Type::f32}, "float32");
}

void split_bf16_arrays(nb::handle p_, nb::handle w_, nb::handle r_) {
  Array p = read_f32(p_, "p"), w = write_bf16(w_, "w"), r = write_i16(r_, "r");
  size_t count = common_size({{"w", w}, {"r", r}, {"p", p}}, 2);
  nb::gil_scoped_release release;
  split(static_cast<const float*>(p.data), static_cast<uint16_t*>(w.data),
        static_cast<int16_t*>(r.data), count);
}

void join_bf16_arrays(nb::handle w_, nb::handle r_, nb::handle p_) {
  Array w = array_argument(w_, "w", Access::read, {Type::u16, Type::bf16}, "uint16 or bfloat16");
  Array r = array_argument(r_, "r", Access::read, {Type::i16}, "int16");
  Array p = write_f32(p_, "p");
  size_t count = common_size({{"p", p}, {"w", w}, {"r", r}}, 1);
  nb::gil_scoped_release release;
  join(static_cast<const uint16_t*>(w.data), static_cast<const int16_t*>(r.data),
       static_cast<float*>(p.data), count);
}

void to_fp16_arrays(nb::handle p_, nb::handle w_) {
  Array p = read_f32(p_, "p"), w = write_fp16(w_, "w");
  size_t count = common_size({{"w", w}, {"p", p}}, 1);
  nb::gil_scoped_release release;
  to_fp16(static_cast<const float*>(p.data), static_cast<uint16_t*>(w.data), count);
}

// Return the bytes of an object with a contiguous buffer (bytes, numpy arrays) or of a uint8
// tensor.
uint32_t crc32c_of(nb::handle buffer, uint32_t seed) {
  Py_buffer view;
  if (PyObject_CheckBuffer(buffer.ptr())) {
    if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) {
      PyErr_Clear();
      refuse_value("buffer", "must be contiguous");
    }
    uint32_t crc;
    {
      nb::gil_scoped_release release;
      crc = crc32c(view.buf, static_cast<size_t>(view.len), seed);
    }
    PyBuffer_Release(&view);
    return crc;
  }
  Array a = array_argument(buffer, "buffer", Access::read, {Type::u8}, "uint8");
  nb::gil_scoped_release release;
  return crc32c(a.data, a.size, seed);
}

using Part = std::tuple<size_t, size_t, uint32_t>;  // begin, end, checksum

// Only the bytes between the parts are read; the checksums of the parts are given.
uint32_t crc32c_around(nb::handle buffer, const std::vector<Part>& parts) {
  Array a = array_argument(buffer, "buffer", Access::read, {Type::u8}, "uint8");
  const char* data = static_cast<const char*>(a.data);
  nb::gil_scoped_release release;
  uint32_t crc = 0;
  size_t at = 0;
  for (const auto& [begin, end, own] : parts) {
    if (begin < at || end < begin || end > a.size)
      throw std::invalid_argument("parts must be in order, apart and inside the buffer of " +
                                  std::to_string(a.size) + " bytes, got " + std::to_string(begin) +
                                  " to " + std::to_string(end));
    crc = crc32c_combine(crc32c(data + at, begin - at, crc), own, crc32c_factor(end - begin));
    at = end;
  }
  return crc32c(data + at, a.size - at, crc);
}

double sum_squares_of(nb::handle x_) {
  Array x = array_argument(x_, "x", Access::read, {Type::f32, Type::bf16, Type::f16},
                           "float32, bfloat16 or float16");
  Grad type = x.type == Type::f32 ? Grad::fp32 : x.type == Type::bf16 ? Grad::bf16 : Grad::fp16;
  nb::gil_scoped_release release;
  return sum_squares(x.data, type, x.size);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("split_bf16", split_bf16_arrays, "p"_a, "w"_a, "r"_a,
        "Writes w, the nearest bfloat16 of p, and r, so that (w << 16) + r are the bits of p.");
  m.def("join_bf16", join_bf16_arrays, "w"_a, "r"_a, "p"_a, "Writes p from (w << 16) + r.");
  m.def("to_fp16", to_fp16_arrays, "p"_a, "w"_a, "Writes w, p rounded to the nearest float16.");
  m.def("sum_squares", sum_squares_of, "x"_a,
        "Sum of squares of float32, bfloat16 or float16 elements, in double precision.");
  m.def("crc32c", crc32c_of, "buffer"_a, "seed"_a = 0,
        "CRC-32C of a contiguous buffer; seed is the checksum of what came before.");
  m.def("crc32c_around", crc32c_around, "buffer"_a, "parts"_a,
        "CRC-32C of an array of bytes, of which parts, (begin, end, CRC-32C), are known already.");
  m.def("isa", [] { return std::string(isa_name(isa())); }, "Instruction set in use.");
  m.def("set_isa", &set_isa, "name"_a, "Forces plain, avx2 or avx512; ValueError if unsupported.");
  m.def(
      "supported_isas",
      [] {
        std::vector<std::string> names;
        for (Isa i : supported_isas()) names.emplace_back(isa_name(i));
        return names;
      },
      "Instruction sets that work here, the fastest last.");
  m.def("threads", &threads, "Threads that a kernel call may use.");
  m.def("set_threads", &set_threads, "count"_a, "Sets how many threads a kernel call may use.");
}

}  // namespace lohan
