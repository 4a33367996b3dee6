// Package port finds addresses for servers that a test starts later, or kills and restarts at the same address.
//
// A server that reports its address does not need it: it can listen on port 0.
package port

import (
	"errors"
	"net"
	"os"
	"strconv"
	"sync/atomic"
)

// The kernel gives ports from 32768 on to processes that connect or listen on port 0, so a free one may be taken before
// it is used. Kubernetes' own ports are below 12000, and its node ports begin at 30000.
const (
	first = 12000
	count = 18000
)

var given atomic.Int64

// Free returns a loopback address, HOST:PORT, on which nothing listens. Processes that call it at the same time get
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
