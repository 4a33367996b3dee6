package firecracker

import (
	"fmt"
	"os"
	"testing"

	"cocoonstack.io/cocoon/internal/guest/link"
	"cocoonstack.io/cocoon/internal/hypervisor/pager"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestMain lets the test binary be a pager, and /echo of the guest, which sends back what comes over the virtio socket.
func TestMain(m *testing.M) {
	if pager.Is(os.Args[1:]) {
		os.Exit(pager.Main(os.Args[1:], os.Stderr))
	}
	if os.Args[0] == "/echo" {
		echo()
	}
	os.Exit(netns.Main(m))
}

func echo() {
	dev, err := link.OpenVSOCK(vm.AgentPort)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for buf := make([]byte, 4096); ; {
		n, err := dev.Read(buf, false)
		if err == nil {
			_, err = dev.Write(buf[:n])
		}
		if err != nil {
			fmt.Println(err)
		}
	}
}
