package podprovider

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/runtimetest"
)

func TestFakeIsARuntime(t *testing.T) {
	e := newEngine()
	e.pullAs = func(_ context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
		return image.Image{}, errdefs.NotFoundf("image %s is not here", r.Name)
	}
	runtimetest.Run(t, e, "demo")
}
