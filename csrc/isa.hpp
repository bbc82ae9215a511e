// The instruction set of the kernels, detected at run time or forced by a test.
#pragma once

#include <string>
#include <vector>

#include "update.hpp"

namespace lohan {

enum class Isa { plain, avx2, avx512 };

Isa isa();
const char* isa_name(Isa);
std::vector<Isa> supported_isas();
void set_isa(const std::string& name);  // throws std::invalid_argument
const Kernels& kernels();
bool has_sse42();

}  // namespace lohan
