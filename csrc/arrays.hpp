// Array arguments from Python, checked by hand so that nothing is ever converted to a temporary and
// every refusal names the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

namespace lohan {

namespace nb = nanobind;

constexpr size_t kWriteAlign = 64;

enum class Type { u8, i16, u16, f16, bf16, f32 };

inline bool has_type(const nb::dlpack::dtype& dtype, Type type) {
  using Code = nb::dlpack::dtype_code;
  auto is = [&](Code code, int bits) {
    return dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits && dtype.lanes == 1;
  };
  switch (type) {
    case Type::u8: return is(Code::UInt, 8);
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
  if (a.size() > 0 && address % wanted != 0)
    refuse_value(name, "must be aligned to " + std::to_string(wanted) +
                           " bytes, its address is " + std::to_string(address % wanted) + " past");
  return {const_cast<void*>(static_cast<const void*>(a.data())), a.size(), *found, item_bytes};
}

inline Array array_argument(nb::handle object, const char* name, Access access,
                            std::initializer_list<Type> types, const char* types_text) {
  nb::ndarray<> writable;
  if (access == Access::write && nb::try_cast<nb::ndarray<>>(object, writable, false))
    return checked_array(writable, name, kWriteAlign, types, types_text);
  nb::ndarray<nb::ro> readable;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(object, readable, false))
    refuse_type(name, "must be a numpy array or a CPU torch tensor, got " +
                          std::string(nb::str(object.type().attr("__name__")).c_str()));
  if (access == Access::write) refuse_value(name, "is read-only but would be written");
  return checked_array(readable, name, 1, types, types_text);
}

// Arrays of one call: equal lengths, and no written array overlaps another.
inline size_t common_size(std::initializer_list<std::pair<const char*, const Array*>> arrays,
                          size_t written) {
  const auto* first = arrays.begin();
  const size_t size = first->second->size;
  auto begin = [](const Array* a) { return static_cast<const char*>(a->data); };
  auto end = [&](const Array* a) { return begin(a) + a->size * a->item_bytes; };
  for (const auto* a = arrays.begin(); a != arrays.end(); ++a) {
    if (a->second->size != size)
      refuse_value(a->first, "has " + std::to_string(a->second->size) + " elements, but " +
                                 first->first + " has " + std::to_string(size));
    for (const auto* b = arrays.begin(); b != a; ++b) {
      bool any_written = static_cast<size_t>(b - arrays.begin()) < written;
      if (size > 0 && any_written && begin(a->second) < end(b->second) &&
          begin(b->second) < end(a->second))
        refuse_value(a->first, std::string("overlaps ") + b->first + ", which is written");
    }
  }
  return size;
}

}  // namespace lohan
