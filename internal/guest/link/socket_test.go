package link

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Of those who connect to the port of the virtio socket, only the host reaches the agent.
func TestOnlyTheHostConnects(t *testing.T) {
	for cid, want := range map[uint32]bool{
		unix.VMADDR_CID_HYPERVISOR: false, unix.VMADDR_CID_LOCAL: false, unix.VMADDR_CID_HOST: true, 3: false, unix.VMADDR_CID_ANY: false,
	} {
		if got := isHost(&unix.SockaddrVM{CID: cid, Port: 5252}); got != want {
			t.Errorf("context id %d: %v, want %v", cid, got, want)
		}
	}
}
