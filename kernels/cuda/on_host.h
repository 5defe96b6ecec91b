// What a CUDA source needs to compile with a C++ compiler and run on the host, thread by thread.
//
// Only for kernels whose threads do not talk to each other. `launch` runs every thread of every block in turn, and
// 16-byte accesses are counted, those at addresses that a GPU would refuse apart.

#pragma once
#include <cmath>
#include <cstring>

using std::memcpy;

#define __global__
#define __device__
#define __forceinline__ inline

struct Index {
  unsigned x;
};
static Index blockIdx, threadIdx, blockDim;

static long long vector_accesses, refused_accesses;
#define NOTE_VECTOR(address) (++vector_accesses, refused_accesses += (reinterpret_cast<unsigned long long>(address) & 15) != 0)

static inline unsigned host_bits(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float host_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline float host_from_half(unsigned short half) {
  const unsigned sign = (unsigned)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
  if (exponent == 31) return host_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return std::copysign(std::ldexp((float)fraction, -24), sign ? -1.0f : 1.0f);
  return host_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

// Round to nearest, ties to even.
static inline unsigned short host_to_half(float x) {
  const unsigned sign = (host_bits(x) >> 16) & 0x8000u;
  unsigned bits = host_bits(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
  if (bits < 0x38800000u) return (unsigned short)(sign | (unsigned)std::nearbyint(std::ldexp(host_float(bits), 24)));
  bits += 0xfffu + ((bits >> 13) & 1u) - (112u << 23);
  return (unsigned short)(sign | bits >> 13);
}


typedef void Kernel(const long long*, long long, long long, void*);

extern "C" void launch(Kernel* kernel, unsigned blocks, unsigned threads, const long long* table, long long leaves,
                       long long chunk, void* bucket) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(table, leaves, chunk, bucket);
}

extern "C" long long accesses(int refused) { return refused ? refused_accesses : vector_accesses; }
