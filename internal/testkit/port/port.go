// Package port finds addresses for servers that a test starts later, or kills and starts again where they were.
//
// A server that tells where it listens needs none of it: it listens at port 0.
package port

import (
	"errors"
	"net"
	"os"
	"strconv"
	"sync/atomic"
)

// The kernel gives ports from 32768 on to whoever connects or listens at port 0, so one of these that was free may be
// taken by the time it is wanted. Kubernetes' own are below 12000, its node ports begin at 30000.
const (
	first = 12000
	count = 18000
)

var given atomic.Int64

// Free returns an address of the loopback, HOST:PORT, at which nobody listens. Processes that ask at the same time get
// different ones.
func Free() (string, error) {
	for range count {
		port := first + (int64(os.Getpid())*16+given.Add(1))%count
		addr := net.JoinHostPort("127.0.0.1", strconv.FormatInt(port, 10))
		if l, err := net.Listen("tcp", addr); err == nil {
			return addr, l.Close()
		}
	}
	return "", errors.New("every port from 12000 to 29999 of 127.0.0.1 is taken")
}
