// Sum of squares in double precision, with the same bits for any instruction set and thread count.
#pragma once

#include <stddef.h>

#include "update.hpp"

namespace lohan {

double sum_squares(const void* data, Grad type, size_t count);

}  // namespace lohan
