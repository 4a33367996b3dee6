package kubelet

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestPicturesAreLimited(t *testing.T) {
	var p pictures
	var ends []func()
	for i := range maxPictures {
		end, err := p.begin(fmt.Sprint("ns/", i/maxPicturesPod))
		if err != nil {
			t.Fatalf("picture %d: %v", i, err)
		}
		ends = append(ends, end)
	}
	for pod, want := range map[string]string{"ns/0": "of the screen of pod ns/0", "ns/other": "from this node"} {
		if _, err := p.begin(pod); !errdefs.Is(err, errdefs.ResourceExhausted) || !strings.Contains(err.Error(), want) {
			t.Errorf("one more of %s: %v", pod, err)
		}
	}
	ends[0]()
	if end, err := p.begin("ns/other"); err != nil {
		t.Errorf("in the place of one that was read: %v", err)
	} else {
		end()
	}
	for _, end := range ends[1:] {
		end()
	}
	if p.all != 0 || len(p.of) != 0 {
		t.Errorf("%d pictures are left, of %v", p.all, p.of)
	}
}

// A picture that is read, or that could not be taken, is not on its way any more.
func TestPicturesEnd(t *testing.T) {
	n := serve(t)
	one := remotecommand.StreamOptions{Stdout: io.Discard}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for range 2 * maxPictures {
		err := n.look(t, "web", string(contract.DisplayPicture), one)
		for deadline := time.Now().Add(time.Minute); n.answered == http.StatusTooManyRequests && time.Now().Before(deadline); <-tick.C {
			err = n.look(t, "web", string(contract.DisplayPicture), one) // the node notices a moment after its client that the one before has been read
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := n.look(t, "other", string(contract.DisplayPicture), one); err == nil || n.answered != http.StatusBadRequest {
			t.Fatalf("a pod without a screen: %d, %v", n.answered, err)
		}
	}
}
