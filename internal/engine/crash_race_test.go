//go:build race

package engine_test

// pointStride is the distance of the points at which the crash test kills. It is no multiple of three, so that the engine is also killed
// while it recovers.
const pointStride = 5
