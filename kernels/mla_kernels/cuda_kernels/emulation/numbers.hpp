// Conversions of the number formats that the kernels use, bit for bit as the hardware rounds.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda.hpp"

namespace emu {

// A number in a format of `mantissa` stored bits whose smallest normal number is 2^`least`.
inline float round_to(float x, int mantissa, int least) {
    if (!std::isfinite(x) || x == 0) return x;
    const int exponent = std::max(std::ilogb(x), least);
    const double unit = std::ldexp(1.0, exponent - mantissa);
    return float(std::nearbyint(double(x) / unit) * unit);  // ties to even, as the host starts
}

inline float f16_to_f32(uint16_t bits) {
    const int sign = bits >> 15, exponent = bits >> 10 & 31, rest = bits & 1023;
    const float size = exponent == 31   ? (rest ? std::numeric_limits<float>::quiet_NaN() : HUGE_VALF)
                       : exponent == 0 ? std::ldexp(float(rest), -24)
                                       : std::ldexp(float(1024 + rest), exponent - 25);
    return sign ? -size : size;
}

inline uint16_t f32_to_f16(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return 0x7FFF;
    const float size = std::fabs(round_to(x, 10, -14));
    if (size > 65504) return sign | 0x7C00;
    if (size < std::ldexp(1.0f, -14)) return sign | uint16_t(std::ldexp(size, 24));
    const int exponent = std::ilogb(size);
    return sign | uint16_t((exponent + 15) << 10) | uint16_t(std::ldexp(size, 10 - exponent) - 1024);
}

inline float bf16_to_f32(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }

inline uint16_t f32_to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if (std::isnan(x)) return 0x7FFF;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float e4m3_to_f32(uint8_t bits) {
    const int sign = bits >> 7, exponent = bits >> 3 & 15, rest = bits & 7;
    const float size = (bits & 0x7F) == 0x7F ? std::numeric_limits<float>::quiet_NaN()
                       : exponent == 0       ? std::ldexp(float(rest), -9)
                                             : std::ldexp(float(8 + rest), exponent - 10);
    return sign ? -size : size;
}

// Beyond 448 saturates (satfinite); NaN stays NaN.
inline uint8_t f32_to_e4m3(float x) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7F;
    const float size = std::fmin(std::fabs(round_to(x, 3, -6)), 448.0f);
    if (size < std::ldexp(1.0f, -6)) return sign | uint8_t(std::ldexp(size, 9));
    const int exponent = std::ilogb(size);
    return sign | uint8_t((exponent + 7) << 3) | uint8_t(std::ldexp(size, 3 - exponent) - 8);
}

}  // namespace emu
