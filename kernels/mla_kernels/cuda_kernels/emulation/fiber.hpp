// Stacks that take turns on one thread of the host: what a GPU's threads become here.
//
// A switch saves the registers that a called function must keep, and takes those of the other stack:
// about 20 ns. Threads of the host would do too, at 30 us a switch; a small decode case makes 10,000
// switches for each 16 tokens of a warp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

// Saves the running stack in `*from` and goes on on `to`. The name is given so that it is the same on
// Linux and macOS.
extern "C" void emu_switch(void** from, void* to) asm("emu_switch");

#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the emulation knows how to switch stacks on x86-64 and on 64-bit ARM"
#endif

namespace emu {

class Fiber {
  public:
    static constexpr size_t kStack = 256 * 1024;

    // The first switch to the fiber calls `entry`, which must never return.
    explicit Fiber(void (*entry)()) : memory_(new unsigned char[kStack]) {
        auto top = reinterpret_cast<uintptr_t>(memory_.get() + kStack) & ~uintptr_t(15);
        auto words = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
        words -= 2;  // a called function finds its stack 8 bytes off a multiple of 16
        words[0] = reinterpret_cast<void*>(entry);
        words -= 6;
#else
        words -= 20;
        words[11] = reinterpret_cast<void*>(entry);  // x30, to which `ret` returns
#endif
        sp = words;
    }

    void* sp;

  private:
    std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace emu
