package jail

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestConnectGuest(t *testing.T) {
	for answer, ok := range map[string]bool{"OK 1073741824\nrest": true, "": false, "OK": false, "NO\n": false, strings.Repeat("x", 1000): false} {
		host, hypervisor := net.Pipe()
		got := make(chan string, 1)
		go func() {
			line, _ := bufio.NewReader(hypervisor).ReadString('\n')
			got <- line
			_, _ = io.WriteString(hypervisor, answer)
			hypervisor.Close()
		}()
		err := ConnectGuest(t.Context(), host, 5252)
		if line := <-got; line != "CONNECT 5252\n" {
			t.Errorf("it asked %q", line)
		}
		if ok != (err == nil) || !ok && !errdefs.IsUnavailable(err) {
			t.Errorf("%.20q: %v", answer, err)
		}
		if ok {
			if rest, err := io.ReadAll(host); err != nil || string(rest) != "rest" {
				t.Errorf("after the greeting: %q, %v", rest, err)
			}
		}
		host.Close()
	}
	host, hypervisor := net.Pipe()
	defer hypervisor.Close()
	defer host.Close()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _ = bufio.NewReader(hypervisor).ReadString('\n')
		cancel()
	}()
	if err := ConnectGuest(ctx, host, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("a guest without a driver: %v", err)
	}
}
