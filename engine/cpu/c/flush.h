/* Switches the floating-point mode that flushes denormal numbers to zero. */
#pragma once

#include "vectors.h"

/* Numbers flushed to zero where they are denormal, as vdpbf16ps and tdpbf16ps do: from `flush` to `unflush`. */
INLINE uint64_t flush(void) {
#if defined(__x86_64__)
    const uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1 << 24) : "memory");
    return before;
#else
    return 0;
#endif
}
INLINE void unflush(uint64_t before) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
#else
    (void)before;
#endif
}
