"""Draw docs/step.svg and docs/rooms.svg again: `python tools/diagrams.py`. The rooms and what they import are read from the package."""
import ast, textwrap
from html import escape
from check import ROOMS, ROOT, imports

WIDTH = 430 # of a phone: text stays as large as that around it
# event of fastai's, what happens, what is sent meanwhile to all other workers
STEP = [
    ('next batch', 'all workers draw the same order of samples; each reads its share', ''),
    ('before_batch', 'how many samples each share has is known: that is its weight', ''),
    ('learn.model(x)', 'the forward; batch norm takes its statistics from the global batch', 'batch norm: sums. fsdp: parameters'),
    ('after_loss', 'the loss is weighed: the sum over workers is that of the global batch', ''),
    ('before_backward', 'the message of the batch leaves: nobody waits for it', 'loss, count, stop? save? fingerprint of the weights'),
    ('backward', 'gradients become the mean over the global batch, while they are computed', 'gradients'),
    ('after_backward', 'the message has come: learn.loss is that of the global batch', ''),
    ('step', 'the same step in all workers', 'zero1: parameters'),
    ('after_batch', 'all stop, save, or see that weights have diverged, together', ''),
]
STYLE = '''<style>
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1c2434 } .b { font-weight: 600 } .m { font-family: ui-monospace, monospace; font-weight: 600 }
.s { font-size: 12px; fill: #4a5568 } .sent { font-size: 12px; fill: #fff } .page { fill: #f6f8fc } .box { fill: #fff; stroke: #c3cee2 } .pill { fill: #3f51b5 }
.dot { fill: #3f51b5 } .line { stroke: #c3cee2; fill: none }
@media (prefers-color-scheme: dark) { text { fill: #e6eaf4 } .s { fill: #b4bfd4 } .page { fill: #1e2536 } .box { fill: #2a3349; stroke: #46526e } .pill { fill: #5c6fd8 }
.dot { fill: #93a2f5 } .line { stroke: #46526e } .sent { fill: #fff } }
</style>'''


def text(x, y, s, cls='', width=60, gap=15):
    "Lines of text from `y` on, and the `y` after them"
    lines = textwrap.wrap(s, width)
    return ''.join(f'<text x="{x}" y="{y+i*gap}" class="{cls}">{escape(o)}</text>' for i, o in enumerate(lines)), y+len(lines)*gap


def svg(body, height, title):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"><title>{escape(title)}</title>\n{STYLE}\n'
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>\n{body}\n</svg>\n')


def step():
    "A step from top to bottom: on the left what happens in each worker, on the right what it sends"
    body, y = ['<text x="14" y="22" class="b">in each worker</text><text x="288" y="22" class="b">sent to all</text>'], 34
    for event, happens, sent in STEP:
        told, end = text(24, y+36, happens, 's', 38)
        pill, below = text(296, y+18, sent, 'sent', 19)
        height = max(end-y, below-y)-4
        body.append(f'<rect class="box" x="14" y="{y}" width="258" height="{height}" rx="5"/><text x="24" y="{y+18}" class="m">{escape(event)}</text>{told}')
        if sent: body.append(f'<path class="line" d="M272 {y+14} h14"/><rect class="pill" x="286" y="{y}" width="132" height="{below-y-4}" rx="5"/>{pill}')
        y += height+8
    return svg('\n'.join(body), y+4, 'What each worker does in a step, and what it sends')


def rooms():
    "Each room with what it is for, the one that imports most on top; a dot for each room that it imports"
    names = [o for o in ROOMS if '/' not in o]
    room = lambda f: f.relative_to(ROOT/'fastdist').parts[0]
    uses = {o: {room(f) for p in (ROOT/'fastdist'/o).rglob('*.py') for f in imports(ROOT, p)} for o in names}
    x, body, y = {o: 258+i*13 for i, o in enumerate(names)}, [], 10
    for o in reversed(names):
        about = ast.get_docstring(ast.parse((ROOT/'fastdist'/o/'__init__.py').read_text(encoding='utf-8'))).partition(':')[0].replace('`', '')
        told, end = text(24, y+34, about, 's', 36)
        body.append(f'<rect class="box" x="14" y="{y}" width="{WIDTH-28}" height="{end-y-6}" rx="5"/><text x="24" y="{y+18}" class="b">{o}</text>{told}')
        body += [f'<circle class="dot" cx="{x[p]}" cy="{(y+end-6)/2}" r="4"/>' for p in names if p in uses[o]-{o}]
        y = end+2
    body += [f'<text transform="translate({x[o]+4} {y+8}) rotate(90)" class="s">{o}</text>' for o in names]
    return svg('\n'.join(body), y+84, 'The rooms of the package, and which of them each imports')


def draw(): return {'step.svg': step(), 'rooms.svg': rooms()}


if __name__ == '__main__':
    for name, content in draw().items(): (ROOT/'docs'/name).write_text(content, encoding='utf-8')
