// The kernel of scatter.cpp, for any device since compute capability 7.0 (the driver compiles it for the one at hand).
//
//   scatter(tiles, count, source, destination): block b copies tiles b, b + blocks, ...; a tile is {source offset, destination offset, bytes}, three
//   64-bit integers. 16 bytes a thread and access where all three are multiples of 16, four accesses in flight; single bytes otherwise.
//   Ends with a system-wide fence, so that whoever sees the launch's end sees the bytes, also from another device.
#pragma once

namespace baton {

constexpr char SCATTER_PTX[] = R"ptx(
.version 7.0
.target sm_70
.address_size 64

.visible .entry scatter(.param .u64 p_tiles, .param .u32 p_count, .param .u64 p_source, .param .u64 p_destination)
{
    .reg .pred %p<8>;
    .reg .b32 %r<32>;
    .reg .b64 %d<32>;

    ld.param.u64 %d1, [p_tiles];
    cvta.to.global.u64 %d1, %d1;
    ld.param.u32 %r1, [p_count];
    ld.param.u64 %d2, [p_source];
    ld.param.u64 %d3, [p_destination];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %ntid.x;

next_tile:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra finish;
    mul.wide.u32 %d4, %r2, 24;
    add.u64 %d4, %d1, %d4;
    ld.global.u64 %d5, [%d4];
    ld.global.u64 %d6, [%d4+8];
    ld.global.u64 %d7, [%d4+16];
    add.u64 %d5, %d5, %d2;
    add.u64 %d6, %d6, %d3;
    or.b64 %d8, %d5, %d6;
    or.b64 %d8, %d8, %d7;
    and.b64 %d8, %d8, 15;
    setp.ne.u64 %p2, %d8, 0;
    @%p2 bra bytes;

    // stride of a block's pass in bytes: 16 * threads
    mul.wide.u32 %d9, %r5, 16;
    mul.wide.u32 %d10, %r4, 16;
    shl.b64 %d11, %d9, 1;
    add.u64 %d12, %d11, %d9;
    shl.b64 %d13, %d9, 2;

four:
    // while the last of four accesses is inside
    add.u64 %d14, %d10, %d12;
    add.u64 %d14, %d14, 16;
    setp.gt.u64 %p3, %d14, %d7;
    @%p3 bra one;
    add.u64 %d15, %d5, %d10;
    add.u64 %d16, %d15, %d9;
    add.u64 %d17, %d15, %d11;
    add.u64 %d18, %d15, %d12;
    ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%d15];
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d16];
    ld.global.v4.u32 {%r14, %r15, %r16, %r17}, [%d17];
    ld.global.v4.u32 {%r18, %r19, %r20, %r21}, [%d18];
    add.u64 %d19, %d6, %d10;
    add.u64 %d20, %d19, %d9;
    add.u64 %d21, %d19, %d11;
    add.u64 %d22, %d19, %d12;
    st.global.v4.u32 [%d19], {%r6, %r7, %r8, %r9};
    st.global.v4.u32 [%d20], {%r10, %r11, %r12, %r13};
    st.global.v4.u32 [%d21], {%r14, %r15, %r16, %r17};
    st.global.v4.u32 [%d22], {%r18, %r19, %r20, %r21};
    add.u64 %d10, %d10, %d13;
    bra four;

one:
    setp.ge.u64 %p4, %d10, %d7;
    @%p4 bra tile_done;
    add.u64 %d15, %d5, %d10;
    ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%d15];
    add.u64 %d19, %d6, %d10;
    st.global.v4.u32 [%d19], {%r6, %r7, %r8, %r9};
    add.u64 %d10, %d10, %d9;
    bra one;

bytes:
    cvt.u64.u32 %d10, %r4;
    cvt.u64.u32 %d9, %r5;
next_byte:
    setp.ge.u64 %p5, %d10, %d7;
    @%p5 bra tile_done;
    add.u64 %d15, %d5, %d10;
    ld.global.u8 %r6, [%d15];
    add.u64 %d19, %d6, %d10;
    st.global.u8 [%d19], %r6;
    add.u64 %d10, %d10, %d9;
    bra next_byte;

tile_done:
    add.u32 %r2, %r2, %r3;
    bra next_tile;

finish:
    membar.sys;
    ret;
}
)ptx";

} // namespace baton
