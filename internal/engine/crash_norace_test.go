//go:build !race

package engine_test

// pointStride is the distance of the points at which the crash test kills.
const pointStride = 1
