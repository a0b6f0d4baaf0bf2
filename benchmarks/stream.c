/* The compiled yardstick for localllm's numpy bandwidth measurement: STREAM's copy and triad, and a dot product (read).
 *
 * After John McCalpin's STREAM (https://www.cs.virginia.edu/stream/): same kernels, same counting (copy 16 bytes and
 * triad 24 bytes per element, write-allocate traffic not counted), best of the repetitions. numpy asks Linux for huge
 * pages behind large arrays, so this does too: the yardstick must stand on the same memory. Usage: stream BYTES SECONDS
 * where BYTES is the size of one array; threads come from OMP_NUM_THREADS. Prints one line of JSON, decimal GB/s.
 */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "usage: stream BYTES SECONDS\n"), 2;
    const long n = atol(argv[1]) / (long)sizeof(double);
    const double limit = atof(argv[2]);
    double *a = aligned_alloc(2 << 20, (n * sizeof(double) / (2 << 20) + 1) * (2 << 20));
    double *b = aligned_alloc(2 << 20, (n * sizeof(double) / (2 << 20) + 1) * (2 << 20));
    double *c = aligned_alloc(2 << 20, (n * sizeof(double) / (2 << 20) + 1) * (2 << 20));
#ifdef MADV_HUGEPAGE
    for (int i = 0; i < 3; i++) madvise(i == 0 ? a : i == 1 ? b : c, n * sizeof(double), MADV_HUGEPAGE);
#endif
    if (!a || !b || !c || n < 1) return fprintf(stderr, "stream: no memory\n"), 1;

#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i++) a[i] = 1.0, b[i] = 2.0, c[i] = 0.0;

    double copy = 1e30, triad = 1e30, read = 1e30, sink = 0.0;
    const double started = omp_get_wtime();
    for (int round = 0; round < 2 || omp_get_wtime() - started < limit; round++) {
        double t = omp_get_wtime();
#pragma omp parallel for schedule(static)
        for (long i = 0; i < n; i++) c[i] = a[i];
        t = omp_get_wtime() - t;
        if (round && t < copy) copy = t;

        t = omp_get_wtime();
#pragma omp parallel for schedule(static)
        for (long i = 0; i < n; i++) a[i] = b[i] + 3.0 * c[i];
        t = omp_get_wtime() - t;
        if (round && t < triad) triad = t;

        t = omp_get_wtime();
        double sum = 0.0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
        for (long i = 0; i < n; i++) sum += a[i] * b[i];
        t = omp_get_wtime() - t;
        sink += sum;
        if (round && t < read) read = t;
    }
    printf("{\"copy\": %.2f, \"triad\": %.2f, \"read\": %.2f, \"threads\": %d, \"sink\": %g}\n", 16.0 * n / copy / 1e9,
           24.0 * n / triad / 1e9, 16.0 * n / read / 1e9, omp_get_max_threads(), sink > 0 ? 1.0 : 0.0);
    return 0;
}
