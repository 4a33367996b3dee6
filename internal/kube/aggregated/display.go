package aggregated

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Subresources of an instance about its screen.
const (
	vncSubresource        = "vnc"
	screenshotSubresource = vncSubresource + "/screenshot"
)

// maxPicture is the limit of a picture in bytes.
const maxPicture = 64 << 20

// vnc connects a websocket to the screen of an instance. It ends the connection that somebody has, unless the client preserves it.
func (s *Server) vnc(w http.ResponseWriter, r *http.Request, t target) error {
	limited, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	pod, err := s.screen(limited, t)
	if err != nil {
		return err
	}
	how := contract.DisplayOpen
	if asked(r, "preserveSession") {
		how = contract.DisplayKeep
	}
	if err := upgradable(r); err != nil {
		return err
	}
	ctx, done, err := s.stream(t)
	if err != nil {
		return err
	}
	defer done()
	return s.attach(ctx, w, r, "the screen of pod "+pod.String(), func(ctx context.Context, in io.Reader, out io.Writer) error { //nolint:contextcheck // as for a console
		err := s.guests.display(ctx, *pod, how, in, out)
		if apierrors.IsConflict(err) { // clients know this sentence
			err = conflict(t, "Active VNC connection. Request denied.")
		}
		return err
	})
}

// screenshot answers with a picture of the screen of an instance. Nobody who is connected is disturbed.
func (s *Server) screenshot(w http.ResponseWriter, r *http.Request, t target) error {
	pod, err := s.screen(r.Context(), t)
	if err != nil {
		return err
	}
	_, done, err := s.stream(t)
	if err != nil {
		return err
	}
	defer done()
	how := contract.DisplayPicture
	if asked(r, "moveCursor") {
		how = contract.DisplayPictureWake
	}
	p := &picture{w: w}
	err = s.guests.display(r.Context(), *pod, how, nil, p)
	if err == nil && !bytes.HasSuffix(p.end, []byte(endOfPicture)) {
		err = errdefs.Unavailablef("the node of pod %s sent no whole picture", pod)
	}
	if err != nil && p.size > 0 { // the answer has begun; its end must not look like that of a whole one
		s.opts.Log.Warn("picture of a screen is not complete", "vm", t.Namespace+"/"+t.Name, "err", err)
		panic(http.ErrAbortHandler)
	}
	return err
}

// picture writes the answer. Its header comes with the first byte: until then the answer can be an error.
type picture struct {
	w    http.ResponseWriter
	size int
	end  []byte // the last bytes
}

// endOfPicture is how a PNG ends. A connection that is lost may look like the end of the stream.
const endOfPicture = "IEND\xaeB`\x82"

func (p *picture) Write(b []byte) (int, error) {
	if p.size == 0 {
		p.w.Header().Set("Content-Type", "image/png")
		p.w.Header().Set("X-Content-Type-Options", "nosniff")
	}
	if p.size += len(b); p.size > maxPicture {
		return 0, fmt.Errorf("the picture is larger than %d bytes", maxPicture)
	}
	p.end = append(p.end, b...)
	p.end = p.end[max(0, len(p.end)-len(endOfPicture)):]
	return p.w.Write(b)
}

// asked reads a parameter of the query. As in KubeVirt, what is no boolean is false.
func asked(r *http.Request, name string) bool {
	v, err := strconv.ParseBool(r.URL.Query().Get(name))
	return err == nil && v
}

// screen returns the pod of an instance whose screen can be looked at. Errors: 400, 404.
func (s *Server) screen(ctx context.Context, t target) (*types.NamespacedName, error) {
	vmi, err := s.instance(ctx, t)
	if err != nil {
		return nil, err
	}
	switch graphics := vmi.Spec.Domain.Devices.AutoattachGraphicsDevice; {
	case graphics != nil && !*graphics:
		return nil, apierrors.NewBadRequest("No graphics devices are present.")
	case vmi.Status.Phase == v1.Failed:
		return nil, conflict(t, "VMI is in failed status")
	case !vmi.IsRunning():
		return nil, apierrors.NewBadRequest("VMI is not running") // clients try again
	}
	pod, err := s.runningPod(ctx, vmi)
	if err == nil && pod == nil {
		err = apierrors.NewBadRequest("VMI is not running: it has no pod that runs")
	}
	return pod, err
}
