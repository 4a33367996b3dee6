package nodeapi_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeapi"
)

func TestDisplay(t *testing.T) {
	var asked []string
	ours, theirs := net.Pipe()
	s := &scripted{display: func(ref string, keep bool) (io.ReadWriteCloser, error) {
		asked = append(asked, fmt.Sprint(ref, keep))
		if keep {
			return nil, errdefs.Conflictf("somebody is connected to its screen")
		}
		return theirs, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	if _, err := c.Display(t.Context(), "web", true); errdefs.ClassOf(err) != errdefs.Conflict {
		t.Errorf("a screen that somebody has: %v", err)
	}
	if _, err := c.Display(t.Context(), "", false); !errdefs.IsInvalid(err) {
		t.Errorf("a screen of no VM: %v", err)
	}
	con, err := c.Display(t.Context(), "web", false)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = ours.Write([]byte("RFB 003.008\n")) }()
	buf := make([]byte, 12)
	if _, err := io.ReadFull(con, buf); err != nil || string(buf) != "RFB 003.008\n" {
		t.Errorf("%q, %v", buf, err)
	}
	go func() { _, _ = con.Write(buf) }()
	if _, err := io.ReadFull(ours, buf); err != nil {
		t.Error(err)
	}
	ours.Close()
	if rest, err := io.ReadAll(con); err != nil || len(rest) > 0 {
		t.Errorf("after the end: %q, %v", rest, err)
	}
	if got := fmt.Sprint(asked); got != "[webtrue webfalse]" {
		t.Error(got)
	}
}

// A picture may be larger than a message.
func TestScreenshot(t *testing.T) {
	picture := bytes.Repeat([]byte("pixels"), 2<<20)
	s := &scripted{screenshot: func(ref string, wake bool) ([]byte, error) {
		if !wake {
			return nil, errdefs.Unsupportedf("vm %s has no graphics", ref)
		}
		return picture, nil
	}}
	c, _ := serve(t, s, nodeapi.Config{})
	if _, err := c.Screenshot(t.Context(), "web", false); !errdefs.Is(err, errdefs.Unsupported) {
		t.Error(err)
	}
	if got, err := c.Screenshot(t.Context(), "web", true); err != nil || !bytes.Equal(got, picture) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}
