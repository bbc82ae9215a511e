// Array arguments from Python. They are checked here, so that nothing is ever converted to a
// temporary and every error names the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

namespace lohan {

namespace nb = nanobind;

constexpr size_t kWriteAlign = 64;

enum class Type { u8, i8, i16, u16, f16, bf16, f32 };

inline bool has_type(const nb::dlpack::dtype& dtype, Type type) {
  using Code = nb::dlpack::dtype_code;
  auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  switch (type) {
    case Type::u8: return is(Code::UInt, 8);
    case Type::i8: return is(Code::Int, 8);
    case Type::i16: return is(Code::Int, 16);
    case Type::u16: return is(Code::UInt, 16);
    case Type::f16: return is(Code::Float, 16);
    case Type::bf16: return is(Code::Bfloat, 16);
    default: return is(Code::Float, 32);
  }
}

// A one-dimensional contiguous array in main memory. The Python argument it came from keeps it
// alive during the call.
struct Array {
  void* data;
  size_t size;
  Type type;
  size_t item_bytes;
};

[[noreturn]] inline void refuse_type(const char* name, const std::string& what) {
  throw nb::type_error((std::string(name) + " " + what).c_str());
}

[[noreturn]] inline void refuse_value(const char* name, const std::string& what) {
  throw nb::value_error((std::string(name) + " " + what).c_str());
}

inline void check_aligned(const char* name, uintptr_t address, size_t wanted) {
  if (address % wanted != 0)
    refuse_value(name, "must be aligned to " + std::to_string(wanted) +
                           " bytes, its address is " + std::to_string(address % wanted) + " past");
}

enum class Access { read, write };

template <class NdArray>
Array checked_array(const NdArray& a, const char* name, size_t align,
                    std::initializer_list<Type> types, const char* types_text) {
  if (a.device_type() != nb::device::cpu::value) refuse_type(name, "must be in CPU memory");
  const Type* found = nullptr;
  for (const Type& type : types)
    if (has_type(a.dtype(), type)) found = &type;
  if (found == nullptr) refuse_type(name, std::string("must have dtype ") + types_text);
  if (a.ndim() != 1)
    refuse_value(name, "must be one-dimensional, got " + std::to_string(a.ndim()) + " dimensions");
  if (a.size() > 1 && a.stride(0) != 1)
    refuse_value(name, "must be contiguous, got a stride of " + std::to_string(a.stride(0)));
  const size_t item_bytes = a.dtype().bits / 8;
  const size_t wanted = align > item_bytes ? align : item_bytes;
  const auto address = reinterpret_cast<uintptr_t>(a.data());
  if (a.size() > 0) check_aligned(name, address, wanted);
  return {const_cast<void*>(static_cast<const void*>(a.data())), a.size(), *found, item_bytes};
}

inline Array array_argument(nb::handle object, const char* name, Access access,
                            std::initializer_list<Type> types, const char* types_text,
                            size_t write_align = kWriteAlign) {
  nb::ndarray<> writable;
  if (access == Access::write && nb::try_cast<nb::ndarray<>>(object, writable, false))
    return checked_array(writable, name, write_align, types, types_text);
  nb::ndarray<nb::ro> readable;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(object, readable, false))
    refuse_type(name, "must be a numpy array or a CPU torch tensor, got " +
                          std::string(nb::str(object.type().attr("__name__")).c_str()));
  if (access == Access::write) refuse_value(name, "is read-only but would be written");
  return checked_array(readable, name, 1, types, types_text);
}

struct Named {
  const char* name;
  Array array;
};

// Check that no array of a call overlaps one that is written. Written arrays come first.
inline void check_apart(const std::vector<Named>& arrays, size_t written) {
  auto begin = [](const Array& a) { return static_cast<const char*>(a.data); };
  auto end = [&](const Array& a) { return begin(a) + a.size * a.item_bytes; };
  for (size_t i = 0; i < arrays.size(); ++i)
    for (size_t k = 0; k < i && k < written; ++k) {
      const Array &a = arrays[i].array, &b = arrays[k].array;
      if (a.size > 0 && b.size > 0 && begin(a) < end(b) && begin(b) < end(a))
        refuse_value(arrays[i].name, std::string("overlaps ") + arrays[k].name +
                                         ", which is written");
    }
}

// Check that all arrays have the length of the first.
inline size_t common_size(const std::vector<Named>& arrays) {
  const size_t size = arrays[0].array.size;
  for (const Named& a : arrays)
    if (a.array.size != size)
      refuse_value(a.name, "has " + std::to_string(a.array.size) + " elements, but " +
                               arrays[0].name + " has " + std::to_string(size));
  return size;
}

inline size_t common_size(const std::vector<Named>& arrays, size_t written) {
  const size_t size = common_size(arrays);
  check_apart(arrays, written);
  return size;
}

}  // namespace lohan
